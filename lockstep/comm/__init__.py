"""One rank's gradients -> everyone's."""
