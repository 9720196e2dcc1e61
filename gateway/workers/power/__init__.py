"""Power and display of the machine: prevention of sleep, and a pace of workers that leaves GPU time to the display."""
