"""Where the processes of a server run: devices, memory and CPUs."""
