"""The dependencies of lazyscope: pinned versions with hashes, licences, and the bill of materials of a release."""
