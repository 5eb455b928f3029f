"""What Holdfast promises on an accelerator, in stages that a machine lent for minutes can run."""
