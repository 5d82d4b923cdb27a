"""The commands of `qspec`, a folder for each family. The system imports nothing from here."""
