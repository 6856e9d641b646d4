package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/ib"
	"ipoibcm/internal/expect"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/mad"
	"ipoibcm/wire/nd"
	"ipoibcm/wire/pcapng"
	"ipoibcm/wire/pcapng/pcapngtest"
	"ipoibcm/wire/roce"
	"ipoibcm/wire/roce/rocetest"
)

// A capture follows the packets of one agent, as ipoibcmd capture does.
type capture struct {
	seg  *segment
	stop context.CancelFunc
	mu   sync.Mutex
	buf  []byte
}

// capture starts to follow the agent's packets, until the test ends.
func (h *host) capture() *capture {
	h.seg.Helper()
	ctx, stop := context.WithCancel(h.seg.ctx)
	body, err := h.agent.Stream(ctx, control.PathCapture)
	h.seg.must(err)
	c := &capture{seg: h.seg, stop: stop}
	done, first := make(chan struct{}), make(chan struct{})
	h.seg.Cleanup(func() { stop(); <-done })
	go func() {
		defer close(done)
		defer body.Close()
		b := make([]byte, 1<<16)
		for begun := false; ; begun = true {
			n, err := body.Read(b)
			c.mu.Lock()
			c.buf = append(c.buf, b[:n]...)
			c.mu.Unlock()
			if !begun {
				close(first) // the header comes once the tap is in place
			}
			if err != nil {
				return
			}
		}
	}()
	<-first
	return c
}

// A frame is one RoCEv2 packet of a capture.
type frame struct {
	out      bool
	src, dst netip.Addr
	roce.Packet
	transport ib.Transport
}

// frames returns what was captured so far.
func (c *capture) frames() []frame {
	c.seg.Helper()
	c.mu.Lock()
	file := append([]byte(nil), c.buf...)
	c.mu.Unlock()
	fs, err := readFrames(wholeBlocks(file))
	c.seg.must(err)
	return fs
}

// wholeBlocks cuts off the block that is still being written.
func wholeBlocks(b []byte) []byte {
	n := 0
	for len(b)-n >= 8 {
		size := int(binary.LittleEndian.Uint32(b[n+4:]))
		if size < 12 || len(b)-n < size {
			break
		}
		n += size
	}
	return b[:n]
}

// readFrames parses a capture file. Every packet in it has a right ICRC.
func readFrames(file []byte) ([]frame, error) {
	p, err := pcapngtest.Read(file)
	if err != nil {
		return nil, err
	}
	var out []frame
	for _, x := range p.Packets {
		packet := x.Data[pcapng.EthernetLen:]
		h, payload, err := rocetest.ParseIP(packet)
		if err != nil {
			return nil, err
		}
		if ok, err := rocetest.CheckIP(packet); !ok || err != nil {
			return nil, fmt.Errorf("packet from %s to %s: ICRC is wrong (%v)", h.Src, h.Dst, err)
		}
		f := frame{out: x.Out, src: h.Src, dst: h.Dst}
		if err := f.Parse(payload); err != nil {
			return nil, err
		}
		f.transport, _ = f.Op.Transport()
		out = append(out, f)
	}
	return out, nil
}

// ipoib returns what an IPoIB frame carries: of a message in several packets,
// the first one says it.
func (f *frame) ipoib() (t encap.EtherType, inner []byte, ok bool) {
	if !f.Op.IsSend() || !f.Op.Starts() || f.BTH.DestQPN() == ib.QPNGSI {
		return 0, nil, false
	}
	var h encap.Header
	if h.UnmarshalBinary(f.Payload) != nil {
		return 0, nil, false
	}
	return h.Type, f.Payload[encap.HeaderLen:], true
}

// Address resolution and multicast travel by UD, a connected QP carries nothing
// but unicast IP, and only once its connection is up; the CM messages carry what
// RFC 4755 wants in them.
func TestWhatTravelsWhere(t *testing.T) {
	parallel(t)
	for _, mode := range []string{"rc", "uc"} {
		t.Run(mode, func(t *testing.T) { // 4755-1-1
			parallel(t)
			s, a, b := startedPair(t, "--mode", mode)
			seen := a.capture()
			want := map[string]string{"rc": "RC", "uc": "UC"}[mode]
			mine, theirs := a.connect(b, want)
			a.reachFull(b, maxMTU)
			for _, g := range []string{"239.9.9.9", "ff05::99"} {
				s.must(a.Multicast(ifName, b.Host, ifName, netip.MustParseAddr(g), 1000, patience))
				s.must(b.Multicast(ifName, a.Host, ifName, netip.MustParseAddr(g), 1000, patience))
			}
			// New addresses are asked for while the connection is up, by both.
			for i, h := range s.hosts {
				peer := s.hosts[1-i]
				for _, x := range []string{fmt.Sprintf("10.0.0.%d/24", 51+i), fmt.Sprintf("fd00::%d/64", 51+i)} {
					s.must(h.AddAddr(ifName, x))
					peer.reach(netip.MustParsePrefix(x).Addr())
				}
			}
			a.paired(b, want)

			links := map[netip.Addr]ib.QPN{} // GID to UD QPN
			for _, h := range s.hosts {
				i := h.status().Interface
				q, err := parseQPN(i.UDQPN)
				s.must(err)
				links[netip.MustParseAddr(i.GID)] = q
			}
			broadcast := netip.MustParseAddr(a.status().Interface.BroadcastGroup)
			n := map[string]int{}
			s.eventually(patience, "the capture has everything", func() error {
				clear(n)
				for _, f := range sentOnce(seen.frames()) {
					// 4755-4-5 4755-7-4 ARP and ND on UD only; 4755-2.1-1 4755-2.1-2 4755-7-3 multicast too
					// 4755-3-1 4755-3-2 4755-2.2-2 asked on the broadcast GID, answered to the asker's UD QPN
					// 4755-3.1-10 4755-3.1-13 the answer names the answerer's UD QPN and GID
					// 4755-4-1 4755-4-2 the type of every frame; 4755-5-1 both families on the connection
					examine(t, f, n, links, broadcast)
				}
				for _, what := range []string{"REQ", "REP", "RTU", "ARP request", "ARP reply in", "ARP reply out", "NS",
					"NA in", "NA out",
					"multicast in", "multicast out", "IPv4 on " + want, "IPv6 on " + want} {
					if n[what] == 0 {
						return fmt.Errorf("no %s: %v", what, n)
					}
				}
				return nil
			})
			// One REQ, REP and RTU, unless the host that answers dials too: then one
			// of two REQs is refused.
			if n["REJ"] > 1 { // 4755-3.2-4 4755-3.3-1
				t.Errorf("number of REJs is %d, want 1 at most", n["REJ"])
			}
			expect.Equal(t, n["REQ"], 1+n["REJ"], "number of REQs")
			expect.Equal(t, n["REP"], 1, "number of REPs")
			expect.Equal(t, n["RTU"], 1, "number of RTUs")
			// 4755-2.3-1 4755-2.3-2 4755-2.3-3 4755-3.1-12 4755-3.2-2 4755-3.2-3 4755-3.2-5 4755-3.2-6
			// 4755-3.2-11 4755-3.2-12 4755-3.5-4 4755-6-1 4755-6-2 4755-6-3 4755-6-5
			checkHandshake(t, sentOnce(seen.frames()), mine, theirs, links)
		})
	}
}

// sentOnce returns fs without the CM messages that were sent again because the answer was late.
func sentOnce(fs []frame) []frame {
	seen := map[string]bool{}
	return slices.DeleteFunc(slices.Clone(fs), func(f frame) bool {
		if f.BTH.DestQPN() != ib.QPNGSI {
			if typ, _, ok := f.ipoib(); !ok || typ != encap.InbandCM {
				return false
			}
		}
		again := seen[string(f.Payload)]
		seen[string(f.Payload)] = true
		return again
	})
}

// examine checks one frame and counts what it is.
func examine(t *testing.T, f frame, n map[string]int, links map[netip.Addr]ib.QPN, broadcast netip.Addr) {
	t.Helper()
	dir := map[bool]string{true: " out", false: " in"}[f.out]
	if f.BTH.DestQPN() == ib.QPNGSI {
		if _, m, err := mad.Parse(f.Payload); err == nil {
			n[m.Attr().String()]++
		}
		return
	}
	typ, inner, ok := f.ipoib()
	if !ok {
		return
	}
	connected := f.transport != ib.UD
	if !connected && f.DETH().SrcQPN() != links[f.src] { // one UD QP per interface
		t.Errorf("a datagram from %s has source QPN %s, not %s", f.src, f.DETH().SrcQPN(), links[f.src])
	}
	switch typ {
	case encap.ARP:
		examineARP(t, f, inner, n, links, broadcast)
		return
	case encap.PathProbe: // of our own kind: they ask what the path carries
		return
	case encap.IPv4, encap.IPv6:
	default:
		t.Errorf("type %v on the wire", typ)
		return
	}
	if connected {
		n[fmt.Sprintf("%v on %v", typ, f.transport)]++
	}
	dst, ok := ip.Dst(inner)
	if !ok {
		t.Errorf("%v that is none: % x", typ, inner[:min(len(inner), 20)])
		return
	}
	if ip.IsGroup(dst) {
		n["multicast"+dir]++
		if connected {
			t.Errorf("a packet to %s on a connected QP", dst)
		}
	}
	switch nd.KindOf(inner) {
	case nd.NeighborSolicitation:
		n["NS"]++
		if connected {
			t.Error("a Neighbor Solicitation on a connected QP")
		}
	case nd.NeighborAdvertisement:
		n["NA"+dir]++
		if connected {
			t.Error("a Neighbor Advertisement on a connected QP")
		}
	}
}

// examineARP: ARP goes by UD, replies to the UD QP of the asker.
func examineARP(t *testing.T, f frame, inner []byte, n map[string]int, links map[netip.Addr]ib.QPN,
	broadcast netip.Addr) {
	t.Helper()
	if f.transport != ib.UD {
		t.Error("ARP on a connected QP")
	}
	var p arp.Packet
	if err := p.UnmarshalBinary(inner); err != nil {
		t.Errorf("ARP: %v", err)
		return
	}
	if p.Sender.GID.Addr() != f.src || p.Sender.QPN != links[f.src] {
		t.Errorf("ARP from %s has sender %s", f.src, p.Sender)
	}
	if p.Op == arp.Reply {
		n["ARP reply"+map[bool]string{true: " out", false: " in"}[f.out]]++
		if f.BTH.DestQPN() != links[f.dst] {
			t.Errorf("an ARP reply goes to %s QPN %s, not to the asker's UD QP", f.dst, f.BTH.DestQPN())
		}
	} else if f.dst == broadcast {
		n["ARP request"]++
	}
}

func parseQPN(s string) (q ib.QPN, err error) {
	_, err = fmt.Sscanf(s, "0x%x", &q)
	return q, err
}

// checkHandshake looks into the CM messages, and that no IP went over the
// connection before its REP.
func checkHandshake(t *testing.T, fs []frame, mine, theirs control.Conn, links map[netip.Addr]ib.QPN) {
	t.Helper()
	up, won := false, 0
	for _, f := range fs {
		if f.transport != ib.UD && !up {
			t.Error("a packet on a connected QP before the connection was there")
			return
		}
		if f.BTH.DestQPN() != ib.QPNGSI {
			continue
		}
		_, m, err := mad.Parse(f.Payload)
		if err != nil {
			t.Error(err)
			continue
		}
		var private []byte
		switch m := m.(type) {
		case mad.REQ:
			private = m.PrivateData[:]
			if got, want := m.ServiceID.String(), fmt.Sprintf("0x0100000000%06x", uint32(links[f.dst])); got != want {
				t.Errorf("service ID %s, want %s", got, want)
			}
			if q := m.LocalQPN.String(); q == mine.LocalQPN || q == theirs.LocalQPN {
				won++
			}
			if m.Primary.LocalGID.Addr() != f.src {
				t.Errorf("the REQ from %s has GID %s", f.src, m.Primary.LocalGID)
			}
		case mad.REP:
			up, private = true, m.PrivateData[:]
			if q := m.LocalQPN.String(); q != mine.LocalQPN && q != theirs.LocalQPN {
				t.Errorf("the REP has QPN %s", q)
			}
		case mad.RTU:
			private = m.PrivateData[:]
		case mad.REJ:
			private = m.PrivateData[:]
			if m.Reason != mad.RejConsumer {
				t.Errorf("REJ for reason %v", m.Reason)
			}
		default:
			t.Errorf("a %v during the handshake", m.Attr())
			continue
		}
		var p encap.PrivateData
		switch err := p.UnmarshalBinary(private); {
		case err != nil:
			t.Errorf("%v: %v", m.Attr(), err)
		case p.QPN != links[f.src]:
			t.Errorf("%v: QPN is %v, want %v", m.Attr(), p.QPN, links[f.src])
		case p.ReceiveMTU != 65524:
			t.Errorf("%v: ReceiveMTU is %v, want 65524", m.Attr(), p.ReceiveMTU)
		case private[0] != 0:
			t.Errorf("%v: private[0] is %v, want 0", m.Attr(), private[0])
		}
		for _, x := range private[encap.PrivateDataLen:] {
			if x != 0 {
				t.Errorf("%v: private data goes on: % x", m.Attr(), private)
				break
			}
		}
	}
	if won != 1 {
		t.Errorf("%d REQs have a QPN of the connection", won)
	}
}

// Multicast larger than the UD MTU leaves in IP fragments that fit it, and what
// no route says so of is dropped and counted.
func TestOversizeMulticast(t *testing.T) {
	parallel(t)
	s, a, b := connectedPair(t)
	both(b, a.reach)
	seen := a.capture()
	for _, g := range []netip.Addr{netip.MustParseAddr("239.9.9.9"), netip.MustParseAddr("ff05::99"),
		netip.MustParseAddr("10.0.0.255")} {
		if g.IsMulticast() {
			s.must(a.Multicast(ifName, b.Host, ifName, g, 6000, patience))
		} else {
			s.must(a.Do(func() error { return shout(g, 6000) }))
		}
		s.eventually(patience, "fragments to "+g.String()+" in the capture", func() error {
			pieces := 0
			for _, f := range seen.frames() {
				_, inner, ok := f.ipoib()
				if !ok || !f.out {
					continue
				}
				if dst, _ := ip.Dst(inner); dst != g {
					continue
				}
				if f.transport != ib.UD || len(inner) > udMTU { // 4755-7-3 4755-1-3
					t.Errorf("%d octets to %s by %v", len(inner), g, f.transport)
				}
				if isFragment(inner) {
					pieces++
				}
			}
			if pieces < 3 {
				return fmt.Errorf("%d fragments", pieces)
			}
			return nil
		})
	}
	before := a.counter("ipoib", "drop_oversize")
	s.must(a.Do(func() error { return shout(ip.LimitedBroadcast, 6000) })) // it has no route that could say the MTU
	s.eventually(patience, "the drop is counted", func() error {
		if a.counter("ipoib", "drop_oversize") == before {
			return errors.New("it is not")
		}
		return nil
	})
	if n := b.counter("datapath", "rx_ud_oversize"); n != 0 {
		t.Errorf("b saw %d datagrams above the UD MTU", n)
	}
}

func isFragment(p []byte) bool {
	if v4, err := ip.AsV4(p); err == nil {
		return v4.MF() || v4.FragOffset() != 0
	}
	v6, err := ip.AsV6(p)
	return err == nil && v6.NextHeader() == unix.IPPROTO_FRAGMENT
}

// shouter is a socket that may send to broadcast addresses through dev. It is told of what the kernel
// drops: without IP_RECVERR, UDP keeps ENOBUFS to itself.
func shouter(dev string) (net.PacketConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		c.Control(func(fd uintptr) {
			err = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1),
				unix.BindToDevice(int(fd), dev),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_RECVERR, 1),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT))
		})
		return err
	}}
	return lc.ListenPacket(context.Background(), "udp4", "0.0.0.0:0")
}

// shout sends one UDP datagram to a broadcast address through the interface. It tries again while the
// kernel's table of neighbours is full: all namespaces share the gc_thresh3 of the ARP table, and the
// tests beside this one can fill it for some seconds.
func shout(dst netip.Addr, size int) error {
	c, err := shouter(ifName)
	if err != nil {
		return err
	}
	defer c.Close()
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		_, err = c.WriteTo(make([]byte, size), &net.UDPAddr{IP: dst.AsSlice(), Port: 9})
		if !errors.Is(err, unix.ENOBUFS) || time.Now().After(deadline) {
			return err
		}
	}
}
