package doctor

import (
	"testing"

	"ipoibcm/control"
)

// goodPeer is one with which all is well.
func goodPeer() PeerFacts {
	f := PeerFacts{IP: "10.0.0.2", LargeOctets: 16384, Small: Echo{Tried: true, MS: 0.2},
		Large: Echo{Tried: true, MS: 0.5}, Conn: &control.Conn{Mode: "RC", MTU: 65520,
			Health: &control.Health{Packets: 10_000, Retransmits: 3}}}
	f.Explained = control.Explanation{IP: f.IP, NextHop: f.IP, Peer: "80 000102 fe80::2", Class: "rfc"}
	f.Own.Interface = control.Interface{Name: "ibcm0", State: "up", Mode: "rc", UDMTU: 2044, PKey: "0xffff",
		QKey: "0x00000b1b"}
	f.Own.Underlay = control.Underlay{MTU: 9000, PathMTU: 4096}
	f.Own.Peers = []control.Peer{{}}
	f.Theirs.Interface = control.Interface{State: "up", Mode: "auto", UDMTU: 2044}
	return f
}

func TestExaminePeer(t *testing.T) {
	gone := func(f *PeerFacts) {
		f.Explained.Peer, f.Conn, f.Small.Err, f.Large.Tried = "", nil, "no answer came", false
		f.Theirs = control.Status{}
	}
	for _, tt := range []struct {
		name   string
		change func(*PeerFacts)
		check  string
		status string
		says   string
	}{
		{"all is well", func(*PeerFacts) {}, PeerLarge, control.CheckOK, "4096 octets, pass in both directions"},
		{"behind a gateway", func(f *PeerFacts) { f.Explained.NextHop = "10.0.0.9" }, PeerNeighbour, control.CheckOK,
			"reached by 10.0.0.9"},
		{"by another device", func(f *PeerFacts) {
			gone(f)
			f.Explained.NextHop = ""
		}, PeerNeighbour, control.CheckFail, "ip route get 10.0.0.2"},
		{"silence, others answer", gone, PeerNeighbour, control.CheckFail, "other hosts do"},
		{"silence of all", func(f *PeerFacts) {
			gone(f)
			f.Own.Peers = nil
		}, PeerNeighbour, control.CheckFail, "open UDP port 4791"},
		{"RC passes, UD does not", func(f *PeerFacts) { f.Explained.Peer = "" }, PeerNeighbour, control.CheckFail,
			"Q_Keys or groups differ"},
		{"UD passes, RC does not", func(f *PeerFacts) { f.Small.Err = "no answer came" }, PeerPath, control.CheckFail,
			"its address was heard"},
		{"Linux has no service", func(f *PeerFacts) {
			f.Explained.Class = "legacy"
			f.Small.Err, f.Small.Hint = "no answer came", "ping it without --rdma"
		}, PeerPath, control.CheckWarn, "without --rdma"},
		{"it may not be asked", func(f *PeerFacts) {
			f.Small.Err, f.Small.Hint, f.Small.Rejected = "consumer reject", "put our GID into peer_allow", true
		}, PeerPath, control.CheckWarn, "into peer_allow"},
		{"a black hole", func(f *PeerFacts) { f.Large.Err = "no answer within 5s" }, PeerLarge, control.CheckFail,
			"ping -M do -s 8952"},
		{"another UD MTU", func(f *PeerFacts) { f.Theirs.Interface.UDMTU = 1500 }, PeerAgreement, control.CheckWarn,
			"the same ud_mtu"},
		{"it is down", func(f *PeerFacts) { f.Theirs.Interface.State = "down" }, PeerAgreement, control.CheckFail, "down"},
		{"a lossy path", func(f *PeerFacts) { f.Conn.Health.Retransmits = 500 }, PeerConnection, control.CheckWarn,
			"5.0 % of our packets"},
		{"refused", func(f *PeerFacts) { f.Conn, f.Explained.LastREJ = nil, "24 (unsupported)" }, PeerConnection,
			control.CheckWarn, "24 (unsupported)"},
	} {
		f := goodPeer()
		tt.change(&f)
		d := ExaminePeer(f)
		if n := len(d.Checks); n != 5 {
			t.Errorf("%s: %d checks, want 5", tt.name, n)
		}
		for _, c := range d.Checks {
			if c.Status == control.CheckFail && d.OK {
				t.Errorf("%s: %s fails, and all is said to be well", tt.name, c.Name)
			}
			if c.Status == control.CheckFail || c.Status == control.CheckWarn {
				wantRemedy(t, tt.name, c)
			}
			if c.Name == tt.check {
				wantCheck(t, tt.name, c, tt.status, tt.says)
			}
		}
	}
}

// An address that no other host of the link can have is named as such, and nothing else is blamed.
func TestMisnamedPeer(t *testing.T) {
	gidOf := func(p control.Peer) func(*PeerFacts) {
		return func(f *PeerFacts) { f.IP, f.Own.Peers = "::ffff:192.0.2.2", []control.Peer{p} }
	}
	for _, tt := range []struct {
		name   string
		change func(*PeerFacts)
		says   string // empty: it is a peer
	}{
		{"an address of this host", func(f *PeerFacts) {
			f.Own.Interface.Addresses = []control.Address{{Prefix: "10.0.0.2/24"}}
		}, "this host's own"},
		{"the GID of this host", func(f *PeerFacts) { f.IP, f.Own.Interface.GID = "fe80::1", "fe80::1" }, "this host's own"},
		{"the GID of a peer", gidOf(control.Peer{GID: "192.0.2.2", LinkAddr: "80 000102", Addresses: []string{"10.0.0.2"}}),
			"is the GID of 80 000102"},
		{"the GID of a peer without address", gidOf(control.Peer{GID: "192.0.2.2", LinkAddr: "80 000102"}), "is the GID of"},
		{"a GID that is an address, too", gidOf(control.Peer{GID: "192.0.2.2", Addresses: []string{"192.0.2.2"}}), ""},
	} {
		f := goodPeer()
		tt.change(&f)
		d := ExaminePeer(f)
		if len(d.Checks) != 5 || d.OK != (tt.says == "") {
			t.Errorf("%s: %d checks and OK %v, want 5 and %v", tt.name, len(d.Checks), d.OK, tt.says == "")
		}
		if tt.says == "" {
			continue
		}
		wantCheck(t, tt.name, d.Checks[0], control.CheckFail, tt.says)
		wantRemedy(t, tt.name, d.Checks[0])
		for _, c := range d.Checks[1:] {
			wantCheck(t, tt.name, c, control.CheckSkipped, "no other host")
		}
	}
}
