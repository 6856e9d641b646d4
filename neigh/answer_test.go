package neigh

import (
	"encoding/hex"
	"net/netip"
	"testing"

	"ipoibcm/ib"
	"ipoibcm/internal/vector"
	"ipoibcm/wire/encap"
)

// A request of which every octet was written by hand from RFC 4391 section 9.1.1
// gets an answer of which every octet was: to the address that the request gives for
// its sender, on its UD QP, and with our own UD QPN, GID and flags.
// 4755-2-3, 4755-3-2, 4755-3.1-1, 4755-3.1-2, 4755-3.1-10, 4755-3.1-13, 4755-3.1-14
func TestAnswerVector(t *testing.T) {
	const (
		head   = "0020" + "0800" + "14" + "04" // InfiniBand, IPv4, 20 and 4 octets
		asker  = "40" + "00abcd" + "fe800000000000000211223344556677"
		askerI = "0a000002" // 10.0.0.2
		ours   = "80" + "81f203" + "fe80000000000000021122fffe334455"
		oursI  = "0a000001"
		nobody = "00" + "000000" + "00000000000000000000000000000000"
	)
	link := encap.LinkAddr{QPN: 0x81f203,
		GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::211:22ff:fe33:4455")), Flags: 0x80}
	from := encap.LinkAddr{QPN: 0x00abcd, GID: ib.GIDFromAddr(netip.MustParseAddr("fe80::211:2233:4455:6677"))}
	tab := newTable(Options{LinkAddr: link})
	request := vector.Hex(head + "0001" + asker + askerI + nobody + oursI)
	got := sent(tab.Step(nil, t0, RecvARP{From: from, Payload: request}))
	if len(got) != 1 {
		t.Fatalf("%d answers, want 1", len(got))
	}
	if got[0].To.Broadcast {
		t.Error("the answer goes to all")
	}
	if to := got[0].To.LinkAddr.Key(); to != from {
		t.Errorf("the answer goes to %v, want %v", to, from)
	}
	if want := head + "0002" + ours + oursI + asker + askerI; hex.EncodeToString(got[0].Payload) != want {
		t.Errorf("the answer is\n%x, want\n%s", got[0].Payload, want)
	}
}
