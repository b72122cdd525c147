"""What measures give back: results, where they come from, files and plots."""
