"""What came out, for people to look at: reports and plots."""
