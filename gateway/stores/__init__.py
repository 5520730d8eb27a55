"""Where things are remembered: one contract, several stores."""
