package ipoib

import (
	"encoding/json"
	"os"
	"testing"
	"time"

	"ipoibcm/internal/vector"
	"ipoibcm/wire/encap"
)

// TestCrossingVectors holds two interfaces to docs/vectors/crossing.json: those whose
// REQs cross, at unequal GIDs: a node of this world has its GID for itself.
func TestCrossingVectors(t *testing.T) {
	b, err := os.ReadFile("../docs/vectors/crossing.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Decisions []struct {
			Name  string
			Given struct {
				Local, Remote string
				Outstanding   bool
			}
			Want struct {
				Verdict string
				Reason  uint16
			}
		}
	}
	if err := json.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	tried := 0
	for i, d := range file.Decisions {
		if !d.Given.Outstanding || link(t, d.Given.Local).GID == link(t, d.Given.Remote).GID {
			continue
		}
		tried++
		w := newWorld(t, uint64(i))
		local := w.nodeAt(1, link(t, d.Given.Local), Options{Mode: ModeAuto, UDMTU: ipv4Only})
		remote := w.nodeAt(2, link(t, d.Given.Remote), Options{Mode: ModeAuto, UDMTU: ipv4Only})
		w.run(2 * time.Second)
		local.look(remote)
		remote.look(local)
		w.run(time.Second)
		w.delay = 1
		local.ping("10.0.0.2", 9000, true)
		remote.ping("10.0.0.1", 9000, true)
		w.settle()
		x, _ := w.agree(local, remote)
		if accepted := !x.Active; accepted != (d.Want.Verdict == "accept") {
			w.Fatalf("%s: accepted = %v, want %s", d.Name, accepted, d.Want.Verdict)
		}
		rej, rejected := lastREJ(local)
		if rejected != (d.Want.Verdict == "reject") {
			w.Fatalf("%s: rejected = %v, want %s", d.Name, rejected, d.Want.Verdict)
		}
		if rejected && uint16(rej.Reason) != d.Want.Reason {
			w.Fatalf("%s: reason %d, want %d", d.Name, rej.Reason, d.Want.Reason)
		}
	}
	if tried < 7 {
		t.Errorf("%d vectors were tried, want 7 at least", tried)
	}
}

// link reads 20 octets in hexadecimal.
func link(t *testing.T, s string) (a encap.LinkAddr) {
	t.Helper()
	if err := a.UnmarshalBinary(vector.Hex(s)); err != nil {
		t.Fatal(err)
	}
	return a
}
