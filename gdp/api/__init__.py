"""The public calls, a file each; the command line calls these and nothing below."""
