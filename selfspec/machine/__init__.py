"""What depends on the machine: devices, processors, memory, and the user's cache folder."""
