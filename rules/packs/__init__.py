"""The shipped packs: rule files, read as data and never run. They are ordinary rule files, to copy and to edit."""
