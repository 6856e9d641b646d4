package engine

import (
	"testing"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/roce"
)

// An ACK or NAK names how many messages the peer has completed: that many, and those under way,
// can be. Of a peer that has never counted so, and beside requests that some do not count, it says
// nothing (IBA volume 1 section 9.7.7.1).
func TestCounted(t *testing.T) {
	const first = 0xfffffe // PSN of the pair
	for _, tt := range []struct {
		name string
		op   verbs.Opcode // of the request before
		n    int          // messages acknowledged before, each by an ACK of its own
		off  uint32       // by how much their MSN is wrong
		msn  uint32       // of the ACK at hand, beyond n
		want DropReason
	}{
		{"right", verbs.Send, msnTrust, 0, 1, NoDrop},
		{"before it was completed", verbs.Send, msnTrust, 0, 0, NoDrop},
		{"more than were posted", verbs.Send, msnTrust, 0, 2, DropMSN},
		{"fewer than were acknowledged", verbs.Send, msnTrust, 0, 1<<24 - 1, DropMSN},
		{"drawn", verbs.Send, msnTrust, 0, 1 << 20, DropMSN},
		{"nothing is known of the peer", verbs.Send, msnTrust - 1, 0, 1 << 20, NoDrop},
		{"the peer counts otherwise", verbs.Send, 2 * msnTrust, 5, 1 << 20, NoDrop},
		{"beside a WRITE", verbs.Write, msnTrust, 0, 1 << 20, NoDrop},
	} {
		p := newPair(t, ib.RC, nil)
		psn := ib.PSN(first)
		ack := func(msn uint32) DropReason {
			b := make([]byte, roce.AETHLen)
			roce.PutAETH(b, roce.SyndromeACK, msn&0xffffff)
			pkt := request(t, roce.BTHFields{Opcode: roce.RCAck, PSN: psn}, b)
			psn = psn.Add(1)
			return p.a.Receive(pkt, &Source{Src: gidB, Dst: gidA}, p.now)
		}
		for i := range tt.n {
			p.a.post(verbs.SendWR{Opcode: verbs.Send, SG: sg([]byte{1})})
			p.output(p.a)
			if got := ack(uint32(i) + 1 + tt.off); got != NoDrop {
				t.Fatalf("%s: ACK %d is dropped as %v", tt.name, i, got)
			}
		}
		p.a.post(verbs.SendWR{Opcode: tt.op, SG: sg([]byte{1})})
		p.output(p.a)
		if got := ack(uint32(tt.n) + tt.msn); got != tt.want {
			t.Errorf("%s: dropped as %v, want %v", tt.name, got, tt.want)
		}
	}
}
