"""The commands of `holdfast`, one module for each thing that they are about."""
