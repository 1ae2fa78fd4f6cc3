"""One module a command; nothing here is imported before its command is run."""
