"""The commands of `holdfast`, one module for each subject."""
