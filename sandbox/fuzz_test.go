package sandbox

import "testing"

// What /proc says of a thread makes nothing fail, and what cannot be read is not taken
// for root's or for protected.
func FuzzThread(f *testing.F) {
	f.Add("Name:\tipoibcmd\nUid:\t0\t65534\t0\t0\nCapPrm:\t0000000000001000\nNoNewPrivs:\t1\nSeccomp:\t2\n")
	f.Add("Uid:\t0\n")
	f.Add("Uid:\t0 x\nSeccomp: x\n")
	f.Fuzz(func(t *testing.T, status string) {
		th := parseThread("7", status)
		if th.id != "7" {
			t.Errorf("thread %q, want 7", th.id)
		}
		if th.noNewPrivs < 0 {
			t.Errorf("no_new_privs %d, want 0 at least", th.noNewPrivs)
		}
		if th.seccomp < 0 {
			t.Errorf("seccomp %d, want 0 at least", th.seccomp)
		}
	})
}

// Without an effective user there is none, which is not root.
func TestThreadWithoutUser(t *testing.T) {
	for _, status := range []string{"", "Uid:\n", "Uid:\t0\n", "Uid:\t0\tx\n"} {
		if got := parseThread("7", status).uid; got != -1 {
			t.Errorf("%q: user %d, want -1", status, got)
		}
	}
}
