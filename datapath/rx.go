package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"ipoibcm/ib"
	"ipoibcm/verbs"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/ip"
	"ipoibcm/wire/nd"
)

// genShift is the lowest bit of the generation of a connection in a work request ID. Shared and UD
// receive buffers have generation 0.
const genShift = 32

// A drainer takes the completions of one CQ. A goroutine of the provider or of the thread runs it.
type drainer struct {
	l   *thread
	cq  verbs.CQ
	mu  sync.Mutex // one run at a time
	wcs [batchLen]verbs.WC

	take func(wcs []verbs.WC, now int64) // gets what was polled
}

// drain polls until the CQ is empty.
func (d *drainer) drain() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for !d.l.done() {
		n := d.cq.Poll(d.wcs[:])
		if n == 0 {
			return
		}
		d.take(d.wcs[:n], nanotime())
	}
}

// poll drains the CQ each time completions come, until the CQ is destroyed.
func (d *drainer) poll() error {
	for {
		d.drain()
		if err := d.cq.Wait(); err != nil {
			return fmt.Errorf("wait for completions: %w", err)
		}
	}
}

// An rxSide takes the completions of one receive CQ: that of the UD QP or that of all connections
// of a thread. Conn.Close frees rings under its mu.
type rxSide struct {
	drainer
	pool   *recvPool // UD or shared buffers; nil if every connection has its own
	shared reposter
	limits limiters // for the UD QP

	pkts  [][]byte
	conns []*Conn // with buffers in back to post again
}

func newRXSide(l *thread, pool *recvPool) *rxSide {
	s := &rxSide{drainer: drainer{l: l}, pool: pool, limits: newLimiters(), pkts: make([][]byte, 0, batchLen),
		conns: make([]*Conn, 0, batchLen)}
	s.take = s.batch
	if pool != nil {
		s.shared.wrs = make([]verbs.RecvWR, 0, len(pool.wrs))
	}
	return s
}

func (s *rxSide) batch(wcs []verbs.WC, now int64) {
	l := s.l
	udQPN := l.udq.qp.QPN()
	for i := range wcs {
		wc := &wcs[i]
		var c *Conn
		pool, back := s.pool, &s.shared
		ud := wc.QPN == udQPN
		if !ud {
			c = l.conns.get(wc.QPN)
		}
		if gen := wc.ID >> genShift; gen != 0 {
			if c == nil || c.recv == nil || c.q.base>>genShift != gen {
				l.c.RxUnknownQP.Add(1) // its ring is gone with it
				continue
			}
			pool, back = c.recv, &c.back
		}
		slot := uint32(wc.ID)
		if pool == nil || int(slot) >= len(pool.wrs) {
			l.c.RxUnknownQP.Add(1)
			continue
		}
		again := true
		switch {
		case wc.Status == verbs.WRFlushError:
			// A dead QP would flush its receive again at once. Receives of the SRQ are posted
			// again.
			again = !ud && back == &s.shared
		case wc.Status != verbs.Success:
			l.c.RxError.Add(1)
			if c != nil {
				c.rxErrors.Add(1)
				c.q.lastErr.Store(uint32(wc.Status))
			}
		case ud:
			s.takeUD(pool.buf(slot, wc.ByteLen), wc, now)
		case c != nil:
			s.takeConn(pool.buf(slot, wc.ByteLen), c, wc.Flags&verbs.Congested != 0, now)
		default:
			l.c.RxUnknownQP.Add(1)
		}
		if again {
			if c != nil && back == &c.back && len(back.wrs) == 0 {
				s.conns = append(s.conns, c)
			}
			back.wrs = append(back.wrs, pool.wrs[slot])
		}
	}

	if len(s.pkts) > 0 {
		n, _ := l.tun.Write(s.pkts)
		if n < len(s.pkts) {
			l.c.RxTUN.Add(uint64(len(s.pkts) - n))
		}
		s.pkts = s.pkts[:0]
	}
	if s.shared.flush() != nil {
		l.c.RepostFailures.Add(1)
	}
	for _, c := range s.conns {
		if c.back.flush() != nil {
			l.c.RepostFailures.Add(1)
		}
	}
	s.conns = s.conns[:0]
}

// takeUD takes one UD message: GRH area, header, then IP, ARP, a CM message or a path probe.
func (s *rxSide) takeUD(msg []byte, wc *verbs.WC, now int64) {
	l := s.l
	if len(msg) < verbs.GRHLen+headerLen {
		l.c.RxShort.Add(1)
		return
	}
	var src, dst ib.GID
	if wc.Flags&verbs.WithGRH != 0 {
		own := *l.gid.Load()
		src, dst = verbs.GRHAddrs(msg[:verbs.GRHLen], own.Is4())
		if wc.SrcQPN == wc.QPN && src == own {
			l.c.RxOwnEcho.Add(1)
			return
		}
	}
	if !l.isAllowed(src) {
		l.c.RxNotAllowed.Add(1)
		return
	}
	frame := msg[verbs.GRHLen:]
	t := encap.EtherType(binary.BigEndian.Uint16(frame))
	pkt := frame[headerLen:]
	if len(pkt) > l.cfg.udMTU() {
		l.c.RxUDOversize.Add(1) // taken, and shown
	}
	switch t {
	case encap.ARP, encap.InbandCM, encap.PathProbe:
		s.control(t, pkt, src, wc.SrcQPN, dst, now)
		return
	case encap.IPv4, encap.IPv6:
	default:
		l.c.RxUnknownType.Add(1)
		return
	}
	if !s.checkIP(t, pkt) {
		return
	}
	if t == encap.IPv6 && nd.KindOf(pkt) != nd.None {
		s.control(t, pkt, src, wc.SrcQPN, dst, now)
		return
	}
	if !l.filtered && !l.allowData(now, src, wc.SrcQPN, frame) {
		l.c.RxUDFlood.Add(1)
		return
	}
	if groups := l.groups.Load(); groups != nil {
		var a netip.Addr
		if t == encap.IPv4 {
			a = netip.AddrFrom4([4]byte(pkt[16:20]))
		} else {
			a = netip.AddrFrom16([16]byte(pkt[24:40]))
		}
		if a.IsMulticast() {
			if _, ok := (*groups)[a]; !ok {
				l.c.RxNotWanted.Add(1)
				return
			}
		}
	}
	if wc.Flags&verbs.Congested != 0 && !s.congested(pkt, ib.UD) {
		return
	}
	l.c.RxUD.Add(1)
	s.deliver(pkt)
}

// takeConn takes one message of a connection, which carries unicast IP only (RFC 4755 sections 2.1
// and 4), and our path probes. Unicast ND is unicast IP (section 7), and Linux sends it on
// connections (ipoib_start_xmit), so it is taken. met says that the message met congestion.
func (s *rxSide) takeConn(msg []byte, c *Conn, met bool, now int64) {
	l := s.l
	c.lastRx.Store(now)
	if len(msg) < headerLen {
		l.c.RxShort.Add(1)
		return
	}
	t := encap.EtherType(binary.BigEndian.Uint16(msg))
	pkt := msg[headerLen:]
	switch t {
	case encap.IPv4, encap.IPv6:
	case encap.PathProbe:
		l.handUp(Frame{Kind: RXProbe, Type: t, Data: pkt, Conn: c})
		return
	case encap.ARP, encap.RARP:
		l.c.RxARPConn.Add(1)
		return
	default:
		l.c.RxUnknownType.Add(1)
		return
	}
	if !s.checkIP(t, pkt) {
		return
	}
	if l.isGroup(t, pkt) { // joined or not
		l.c.RxMulticastConn.Add(1)
		return
	}
	c.rxPackets.Add(1)
	c.rxOctets.Add(uint64(len(pkt)))
	if t == encap.IPv6 && nd.KindOf(pkt) != nd.None {
		l.handUp(Frame{Kind: RXND, Type: t, Data: pkt, Conn: c})
		return
	}
	if met && !s.congested(pkt, c.transport) {
		return
	}
	l.c.RxConn.Add(1)
	s.deliver(pkt)
}

// congested handles an IP packet whose message met congestion, and reports whether to deliver it
// (RFC 6040 section 4.2). An ECN-capable packet gets a CE mark. Another packet is dropped, so that
// its sender learns of the congestion. What came over RC is delivered all the same: there the
// peer's QP slows down, and packets are dropped from the queue in front of it.
func (s *rxSide) congested(pkt []byte, t ib.Transport) bool {
	switch {
	case ip.ECNCapable(pkt):
		ip.SetCE(pkt)
		s.l.c.RxMarked.Add(1)
	case t == ib.RC:
		s.l.c.RxNotECT.Add(1)
	default:
		s.l.c.RxCongested.Add(1)
		return false
	}
	return true
}

// checkIP reports whether pkt is long enough for an IP header of type t and has its IP version. It
// counts packets that fail.
func (s *rxSide) checkIP(t encap.EtherType, pkt []byte) bool {
	need := minIPv4
	if t == encap.IPv6 {
		need = minIP6
	}
	if len(pkt) < need {
		s.l.c.RxShort.Add(1)
		return false
	}
	if ipType(pkt) != t {
		s.l.c.RxMalformed.Add(1)
		return false
	}
	return true
}

// deliver puts pkt into the batch for the TUN.
func (s *rxSide) deliver(pkt []byte) {
	s.l.c.RxPackets.Add(1)
	s.l.c.RxOctets.Add(uint64(len(pkt)))
	s.pkts = append(s.pkts, pkt)
}

// A sendDone takes the completions of the send CQ, and then posts packets that waited for them.
type sendDone struct {
	drainer
	slots []int32
	qs    []*sendQ // queues that have packets waiting, after a completion
	work  *work
}

func (s *sendDone) batch(wcs []verbs.WC, now int64) {
	l := s.l
	udQPN := l.udq.qp.QPN()
	for i := range wcs {
		wc := &wcs[i]
		q := l.udq
		if wc.QPN != udQPN {
			c := l.conns.get(wc.QPN)
			if c == nil {
				continue // closed: close has taken its buffers back
			}
			q = c.q
		}
		switch wc.Status {
		case verbs.Success:
		case verbs.WRFlushError:
			q.flushed.Add(1)
			l.c.TxFlushed.Add(1)
		default:
			q.errs.Add(1)
			q.lastErr.Store(uint32(wc.Status))
			l.c.TxError.Add(1)
		}
		s.slots = q.complete(s.slots, wc.ID, now)
		if q.waiting.Load() > 0 && !slices.Contains(s.qs, q) {
			s.qs = append(s.qs, q)
		}
	}
	l.pool.give(s.slots)
	s.slots = s.slots[:0]
	if len(s.qs) == 0 {
		return
	}
	l.hand.RLock()
	for i, q := range s.qs {
		l.pump(q, s.work, now)
		s.qs[i] = nil
	}
	l.hand.RUnlock()
	s.qs = s.qs[:0]
}
