package doctor

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"ipoibcm/control"
)

// Checks of a peer, in their order.
const (
	PeerNeighbour  = "neighbour"
	PeerPath       = "path"
	PeerLarge      = "large"
	PeerAgreement  = "agreement"
	PeerConnection = "connection"
)

// An Echo is the outcome of calls to the peer's agent over RC. They use nothing of IP and nothing of UD.
type Echo struct {
	Tried    bool
	MS       float64 // of the quickest call
	Err      string
	Hint     string
	Rejected bool // it answered, with a REJ
}

// PeerFacts are what was found about one peer, all by asking the daemon of this host.
type PeerFacts struct {
	IP           string
	Explained    control.Explanation
	Own          control.Status
	Small, Large Echo           // calls with no octets, and with LargeOctets
	LargeOctets  int            // more than one packet of the path MTU
	Theirs       control.Status // the peer's status; empty if its agent did not say
	Conn         *control.Conn  // the connection that is up; nil: none
}

// ExaminePeer returns one check for each name.
func ExaminePeer(f PeerFacts) control.Doctor {
	e := &exam{out: control.Doctor{Version: control.Version, OK: true}}
	if whose, another := f.owner(); whose != "" {
		e.add(PeerNeighbour, misnamed(&f, whose, another))
		for _, name := range []string{PeerPath, PeerLarge, PeerAgreement, PeerConnection} {
			e.add(name, skip("no other host has that address on %s", f.Own.Interface.Name))
		}
		return e.out
	}
	e.add(PeerNeighbour, peerNeighbour(&f))
	e.add(PeerPath, peerPath(&f))
	e.add(PeerLarge, peerLarge(&f))
	e.add(PeerAgreement, peerAgreement(&f))
	e.add(PeerConnection, peerConnection(&f))
	return e.out
}

const openPort = "open UDP port 4791 in both directions on both hosts and between them (doctor without " +
	"--peer reads this host's rules; run it there, too)"

// peerNeighbour looks at ARP and ND, which travel over UD, with the Q_Key and the P_Key.
func peerNeighbour(f *PeerFacts) control.Check {
	x := &f.Explained
	keys := fmt.Sprintf("P_Key %s and Q_Key %s", f.Own.Interface.PKey, f.Own.Interface.QKey)
	switch {
	case x.Peer != "" && x.NextHop != "" && x.NextHop != f.IP:
		return okay("%s is reached by %s, which is at %s", f.IP, x.NextHop, x.Peer)
	case x.Peer != "":
		return okay("%s is at %s", f.IP, x.Peer)
	case x.NextHop == "":
		return fail("ip route get "+f.IP+", and ipoibcmd explain "+f.IP, "packets to %s do not leave by %s",
			f.IP, f.Own.Interface.Name)
	case f.Small.Tried && f.Small.Err == "":
		return fail("compare pkey, qkey and addresses in status on both hosts; this one has "+keys,
			"nobody answers ARP or ND for %s, and its agent answers over RC: P_Keys, Q_Keys or groups differ, or it "+
				"has not that address", x.NextHop)
	case len(f.Own.Peers) > 0:
		return fail("is the agent running there, with this address and "+keys+"? Else "+openPort,
			"nobody answers ARP or ND for %s; other hosts do", x.NextHop)
	}
	return fail(openPort+"; is the agent running there, with "+keys+"?",
		"nobody answers ARP or ND for %s, and no other host has been heard", x.NextHop)
}

// misnamed says what to ask for in place of an address that owner knows.
func misnamed(f *PeerFacts, whose, another string) control.Check {
	if whose == thisHost {
		return fail("name an address of another host; ipoibcmd show neigh has some", "%s is this host's own", f.IP)
	}
	return fail("ipoibcmd doctor --peer "+cmp.Or(another, "with that host's address on "+f.Own.Interface.Name),
		"%s is the GID of %s, on the underlay", f.IP, whose)
}

// thisHost is what owner says of an address of this host.
const thisHost = "this host"

// owner returns whose f.IP is if it is this host's, or the GID of a host and not an address of the link.
// It is thisHost, or the link-layer address of a peer, with an IP address of that peer if one is known.
func (f *PeerFacts) owner() (whose, another string) {
	same := func(s string) bool {
		s, _, _ = strings.Cut(s, "/")
		a, err := netip.ParseAddr(s)
		b, err2 := netip.ParseAddr(f.IP)
		return err == nil && err2 == nil && a.Unmap() == b.Unmap()
	}
	for _, a := range f.Own.Interface.Addresses {
		if same(a.Prefix) {
			return thisHost, ""
		}
	}
	for _, p := range f.Own.Peers {
		if slices.ContainsFunc(p.Addresses, same) {
			return "", ""
		}
	}
	if same(f.Own.Interface.GID) {
		return thisHost, ""
	}
	for _, p := range f.Own.Peers {
		if same(p.GID) {
			return p.LinkAddr, strings.Join(p.Addresses[:min(1, len(p.Addresses))], "")
		}
	}
	return "", ""
}

// peerPath looks at CM messages and small packets of RC, there and back.
func peerPath(f *PeerFacts) control.Check {
	s := &f.Small
	switch {
	case !s.Tried:
		return skip("it was not tried")
	case s.Err == "":
		return okay("its agent answers over RC, in %.2f ms", s.MS)
	case s.Rejected:
		return warn(s.Hint, "packets pass both ways, and its agent refuses: %s", s.Err)
	case f.Explained.Peer != "" && f.Explained.Class == "legacy":
		return warn(s.Hint, "its agent does not answer over RC: %s", s.Err)
	case f.Explained.Peer != "":
		return fail(openPort+"; is the agent still running there?",
			"its address was heard, and its agent does not answer over RC: %s", s.Err)
	}
	return fail(openPort, "its agent does not answer over RC: %s", s.Err)
}

// peerLarge finds paths that small packets pass and large ones do not.
func peerLarge(f *PeerFacts) control.Check {
	l := &f.Large
	switch {
	case f.Small.Err != "" || !l.Tried:
		return skip("small packets come first")
	case l.Err == "":
		return okay("packets of the path MTU, %d octets, pass in both directions", f.Own.Underlay.PathMTU)
	}
	return fail(fmt.Sprintf("find the hop with the smaller MTU: ping -M do -s %d to the underlay "+
		"address there; raise it, or set mtu on a route to that host (ip route replace)", f.Own.Underlay.MTU-48),
		"small packets pass, those of the path MTU, %d octets, do not, in one direction at least: %s",
		f.Own.Underlay.PathMTU, l.Err)
}

// peerAgreement compares what all hosts of a link must have alike.
func peerAgreement(f *PeerFacts) control.Check {
	own, its := &f.Own.Interface, &f.Theirs.Interface
	switch {
	case its.State == "":
		return skip("its agent tells nothing of itself")
	case its.State != "up":
		return fail("look at status there", "its interface is %s", its.State)
	case its.UDMTU > expects(own):
		return warn("give all hosts of the link the same ud_mtu",
			"it sends datagrams of %d octets, we expect %d at most", its.UDMTU, expects(own))
	case own.UDMTU > expects(its):
		return warn("give all hosts of the link the same ud_mtu",
			"we send datagrams of %d octets, it expects %d at most", own.UDMTU, expects(its))
	}
	return okay("both are up, with UD MTU %d there and %d here; its mode is %s, ours %s", its.UDMTU,
		own.UDMTU, its.Mode, own.Mode)
}

// expects returns the largest datagram that an interface expects.
func expects(i *control.Interface) int { return cmp.Or(i.UDAccept, i.UDMTU) }

// Once an RC connection has sent lossyAfter packets, more retransmissions than a share of lossyShare are
// worth a warning.
const lossyAfter, lossyShare = 1000, 0.02

func peerConnection(f *PeerFacts) control.Check {
	x := &f.Explained
	switch c := f.Conn; {
	case c != nil && c.Health != nil && c.Health.Packets >= lossyAfter &&
		float64(c.Health.Retransmits) > lossyShare*float64(c.Health.Packets):
		return warn("look for drops on the way: ethtool -S and ip -s link on both hosts and the switches",
			"%s with MTU %d; %.1f %% of our packets were sent again", c.Mode, c.MTU,
			100*float64(c.Health.Retransmits)/float64(c.Health.Packets))
	case c != nil:
		return okay("%s with MTU %d", c.Mode, c.MTU)
	case x.LastREJ != "":
		return warn("ipoibcmd explain "+f.IP, "there is none; the peer's last REJ: %s", x.LastREJ)
	case x.Peer == "":
		return skip("the peer is not known")
	}
	return okay("there is none now; the first packet makes one where both allow it")
}
