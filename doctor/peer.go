package doctor

import (
	"cmp"
	"fmt"

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
	Tried bool
	MS    float64 // of the quickest call
	Err   string
	Hint  string
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
	e.peerNeighbour(&f)
	e.peerPath(&f)
	e.peerLarge(&f)
	e.peerAgreement(&f)
	e.peerConnection(&f)
	return e.out
}

const openPort = "open UDP port 4791 in both directions on both hosts and between them (doctor without " +
	"--peer reads this host's rules; run it there, too)"

// peerNeighbour looks at ARP and ND, which travel over UD, with the Q_Key and the P_Key.
func (e *exam) peerNeighbour(f *PeerFacts) {
	x := &f.Explained
	keys := fmt.Sprintf("P_Key %s and Q_Key %s", f.Own.Interface.PKey, f.Own.Interface.QKey)
	switch {
	case x.Peer != "" && x.NextHop != "" && x.NextHop != f.IP:
		e.ok(PeerNeighbour, "%s is reached by %s, which is at %s", f.IP, x.NextHop, x.Peer)
	case x.Peer != "":
		e.ok(PeerNeighbour, "%s is at %s", f.IP, x.Peer)
	case x.NextHop == "":
		e.fail(PeerNeighbour, "ip route get "+f.IP+", and ipoibcmd explain "+f.IP, "packets to %s do not leave by %s",
			f.IP, f.Own.Interface.Name)
	case f.Small.Tried && f.Small.Err == "":
		e.fail(PeerNeighbour, "compare pkey, qkey and addresses in status on both hosts; this one has "+keys,
			"nobody answers ARP or ND for %s, and its agent answers over RC: P_Keys, Q_Keys or groups differ, or it "+
				"has not that address", x.NextHop)
	case len(f.Own.Peers) > 0:
		e.fail(PeerNeighbour, "is the agent running there, with this address and "+keys+"? Else "+openPort,
			"nobody answers ARP or ND for %s; other hosts do", x.NextHop)
	default:
		e.fail(PeerNeighbour, openPort+"; is the agent running there, with "+keys+"?",
			"nobody answers ARP or ND for %s, and no other host has been heard", x.NextHop)
	}
}

// peerPath looks at CM messages and small packets of RC, there and back.
func (e *exam) peerPath(f *PeerFacts) {
	switch s := &f.Small; {
	case !s.Tried:
		e.skip(PeerPath, "it was not tried")
	case s.Err == "":
		e.ok(PeerPath, "its agent answers over RC, in %.2f ms", s.MS)
	case f.Explained.Peer != "" && f.Explained.Class != "legacy" && s.Hint == "":
		e.fail(PeerPath, openPort+"; is the agent still running there?",
			"its address was heard, and its agent does not answer over RC: %s", s.Err)
	case f.Explained.Peer != "":
		e.warn(PeerPath, s.Hint, "its agent does not answer over RC: %s", s.Err)
	default:
		e.fail(PeerPath, openPort, "its agent does not answer over RC: %s", s.Err)
	}
}

// peerLarge finds paths that small packets pass and large ones do not.
func (e *exam) peerLarge(f *PeerFacts) {
	switch l := &f.Large; {
	case f.Small.Err != "" || !l.Tried:
		e.skip(PeerLarge, "small packets come first")
	case l.Err == "":
		e.ok(PeerLarge, "packets of the path MTU, %d octets, pass in both directions", f.Own.Underlay.PathMTU)
	default:
		e.fail(PeerLarge, fmt.Sprintf("find the hop with the smaller MTU: ping -M do -s %d to the underlay "+
			"address there; raise it, or set mtu on a route to that host (ip route replace)", f.Own.Underlay.MTU-48),
			"small packets pass, those of the path MTU, %d octets, do not, in one direction at least: %s",
			f.Own.Underlay.PathMTU, l.Err)
	}
}

// peerAgreement compares what all hosts of a link must have alike.
func (e *exam) peerAgreement(f *PeerFacts) {
	own, its := &f.Own.Interface, &f.Theirs.Interface
	switch {
	case its.State == "":
		e.skip(PeerAgreement, "its agent tells nothing of itself")
	case its.State != "up":
		e.fail(PeerAgreement, "look at status there", "its interface is %s", its.State)
	case its.UDMTU > expects(own):
		e.warn(PeerAgreement, "give all hosts of the link the same ud_mtu",
			"it sends datagrams of %d octets, we expect %d at most", its.UDMTU, expects(own))
	case own.UDMTU > expects(its):
		e.warn(PeerAgreement, "give all hosts of the link the same ud_mtu",
			"we send datagrams of %d octets, it expects %d at most", own.UDMTU, expects(its))
	default:
		e.ok(PeerAgreement, "both are up, with UD MTU %d there and %d here; its mode is %s, ours %s", its.UDMTU,
			own.UDMTU, its.Mode, own.Mode)
	}
}

// expects returns the largest datagram that an interface expects.
func expects(i *control.Interface) int { return cmp.Or(i.UDAccept, i.UDMTU) }

// Once an RC connection has sent lossyAfter packets, more retransmissions than a share of lossyShare are
// worth a warning.
const lossyAfter, lossyShare = 1000, 0.02

func (e *exam) peerConnection(f *PeerFacts) {
	x := &f.Explained
	switch c := f.Conn; {
	case c != nil && c.Health != nil && c.Health.Packets >= lossyAfter &&
		float64(c.Health.Retransmits) > lossyShare*float64(c.Health.Packets):
		e.warn(PeerConnection, "look for drops on the way: ethtool -S and ip -s link on both hosts and the switches",
			"%s with MTU %d; %.1f %% of our packets were sent again", c.Mode, c.MTU,
			100*float64(c.Health.Retransmits)/float64(c.Health.Packets))
	case c != nil:
		e.ok(PeerConnection, "%s with MTU %d", c.Mode, c.MTU)
	case x.LastREJ != "":
		e.warn(PeerConnection, "ipoibcmd explain "+f.IP, "there is none; the peer's last REJ: %s", x.LastREJ)
	case x.Peer == "":
		e.skip(PeerConnection, "the peer is not known")
	default:
		e.ok(PeerConnection, "there is none now; the first packet makes one where both allow it")
	}
}
