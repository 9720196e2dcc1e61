"""Power and display of the machine: prevention of sleep, and a pace that leaves GPU time to the display."""
