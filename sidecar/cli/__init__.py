"""The kvctl command line: commands, one printer a format, exit codes."""
