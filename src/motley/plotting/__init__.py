"""Pictures and pages of what runs record, and the view of runs that go on."""
