"""The members of a job: which of them live, the end of a lost one, and the return of hosts."""
