"""Files and folders: whole or absent, checked before they are believed. Knows nothing of what they hold."""
