"""Files and folders, read and written safely."""
