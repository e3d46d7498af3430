"""What lazyscope is made of: pins with their hashes, licences, and the bill of materials of a release."""
