"""mirrord: git-native mirrors and sealed checkouts, served by one daemon per machine."""
