"""What runs while backward goes on: stages of sums, and the options of a plan carried out."""
