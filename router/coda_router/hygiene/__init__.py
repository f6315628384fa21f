"""What some clients put into a prompt that no two requests share, kept out of the prefix; pure functions of bytes."""
