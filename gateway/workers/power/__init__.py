"""Power and display of the machine: sleep is held off while requests run, and a desktop in use gets shorter steps."""
