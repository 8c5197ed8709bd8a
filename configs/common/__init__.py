"""What experiments share: network options, prompts, the reference's training values."""
