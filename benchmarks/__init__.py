"""Speed, measured as ratios on one machine in one run. Nothing here is installed or imported by mlxd."""
