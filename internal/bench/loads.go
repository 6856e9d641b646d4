package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"

	"ipoibcm/internal/lab"
)

// pings are the outcome of many echo requests.
type pings struct {
	sent int
	ms   []float64 // round-trip times of the answered requests
}

// lost is the share of requests without an answer.
func (p pings) lost() float64 { return 1 - float64(len(p.ms))/float64(max(p.sent, 1)) }

// p50 is the median round trip, infinity if nothing was answered.
func (p pings) p50() float64 {
	if len(p.ms) == 0 {
		return math.Inf(1)
	}
	return median(p.ms)
}

const (
	pingEvery = 10 * time.Millisecond
	// pingPatience is how long after the last request answers still count.
	pingPatience = 500 * time.Millisecond
	pingSize     = 64
)

// runPings sends an echo request each [pingEvery] for the time d. Requests do not
// wait for answers.
func runPings(h *lab.Host, dst netip.Addr, d time.Duration) (p pings, err error) {
	v6 := dst.Is6()
	fd, err := lab.In(h, func() (int, error) { return lab.EchoSocket(v6) })
	if err != nil {
		return p, err
	}
	defer unix.Close(fd)
	n := int(d / pingEvery)
	sent := make([]atomic.Int64, n)
	got := make(chan []float64, 1)
	id := uint16(time.Now().UnixNano())
	end := time.Now().Add(d + pingPatience)
	go func() { got <- takeEchoes(fd, id, v6, sent, end) }()
	to := lab.Sockaddr(dst)
	start := time.Now()
	for i := range n {
		time.Sleep(time.Until(start.Add(time.Duration(i) * pingEvery)))
		sent[i].Store(time.Now().UnixNano())
		if e := unix.Sendto(fd, lab.EchoRequest(pingSize, v6, id, uint16(i)), 0, to); e != nil && !errors.Is(e, unix.ENOBUFS) {
			err = e
		}
	}
	return pings{n, <-got}, err
}

// takeEchoes returns the round-trip times of the answers that arrive before end, in ms.
func takeEchoes(fd int, id uint16, v6 bool, sent []atomic.Int64, end time.Time) (ms []float64) {
	tv := unix.Timeval{Usec: 20000}
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
	buf := make([]byte, 2048)
	for len(ms) < len(sent) && time.Now().Before(end) {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		now := time.Now().UnixNano()
		if err != nil {
			continue
		}
		if _, seq, ok := lab.EchoReply(buf[:n], v6, id); ok && int(seq) < len(sent) {
			if at := sent[seq].Swap(0); at != 0 {
				ms = append(ms, float64(now-at)/1e6)
			}
		}
	}
	return ms
}

// A background is a load that goes on until it is stopped, and counts what arrives.
type background struct {
	octets, packets atomic.Uint64 // received
	end             chan struct{}
	running         sync.WaitGroup
	closers         []func() error
	resent          func() resent // what TCP sent and sent again; nil for a load of datagrams

	mu   sync.Mutex
	each []*atomic.Uint64 // octets received, by connection
}

// A resent counts what was sent in all, and what was retransmitted: TCP's octets, and the QPs' packets.
type resent struct{ again, sent, qpAgain, qpSent uint64 }

// since returns the share that was retransmitted after the reading before, in percent: the share of TCP's
// octets plus the share of the QPs' packets.
func (r resent) since(before resent) float64 {
	share := func(again, sent uint64) float64 { return 100 * float64(again) / float64(max(sent, 1)) }
	return share(r.again-before.again, r.sent-before.sent) + r.qpSince(before)
}

// qpSince returns the share of the QPs' packets alone, in percent.
func (r resent) qpSince(before resent) float64 {
	return 100 * float64(r.qpAgain-before.qpAgain) / float64(max(r.qpSent-before.qpSent, 1))
}

// resent returns how much has been retransmitted so far, by TCP for the sender's load l, and by the QPs of
// the sender's agent. For a load of datagrams it returns zeros.
func (m *mesh) resent(l *background) (r resent) {
	if l.resent == nil {
		return r
	}
	r = l.resent()
	a := m.agents[meshSender]
	if a == nil {
		return r
	}
	ctx, stop := context.WithTimeout(context.Background(), time.Second)
	defer stop()
	conns, err := a.Conns(ctx)
	if err != nil {
		return r
	}
	for _, c := range conns {
		if h := c.Health; h != nil {
			r.qpAgain, r.qpSent = r.qpAgain+h.Retransmits, r.qpSent+h.Packets
		}
	}
	return r
}

// received returns how many octets of each connection have arrived.
func (l *background) received() (octets []float64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.each {
		octets = append(octets, float64(n.Load()))
	}
	return octets
}

// shares compares what connections or loads have received between two readings. least and most are
// relative to an equal share; sum is in octets.
func shares(before, after []float64) (least, most, sum float64) {
	got := make([]float64, min(len(before), len(after)))
	for i := range got {
		got[i] = after[i] - before[i]
		sum += got[i]
	}
	if len(got) == 0 || sum == 0 {
		return 0, 0, sum
	}
	equal := sum / float64(len(got))
	return slices.Min(got) / equal, slices.Max(got) / equal, sum
}

// stop ends the load.
func (l *background) stop() {
	close(l.end)
	for _, f := range l.closers {
		_ = f()
	}
	l.running.Wait()
}

// during runs f and returns the Mb/s and the packets per second that arrived meanwhile. packets are
// counted for datagrams only.
func (l *background) during(f func() error) (mbps, pps float64, err error) {
	o, p, start := l.octets.Load(), l.packets.Load(), time.Now()
	err = f()
	d := time.Since(start).Seconds()
	return float64(l.octets.Load()-o) * 8 / 1e6 / d, float64(l.packets.Load()-p) / d, err
}

// datagrams sends UDP datagrams of size octets from one host to the address dst of the
// other, perSecond of them, or as many as possible if that is zero. If dst is a multicast
// address, the device is dev: from sends through it, and to joins on it.
func datagrams(from, to *lab.Host, dev string, dst netip.Addr, size, perSecond int) (l *background, err error) {
	l = &background{end: make(chan struct{})}
	in, err := lab.In(to, func() (*net.UDPConn, error) { return net.ListenUDP("udp", &net.UDPAddr{}) })
	if err != nil {
		return nil, err
	}
	l.closers = append(l.closers, in.Close)
	_ = in.SetReadBuffer(4 << 20)
	if dst.IsMulticast() {
		if dst, err = join(from, to, dev, dst, in); err != nil {
			in.Close()
			return nil, err
		}
	}
	port := in.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	out, err := lab.In(from, func() (*net.UDPConn, error) {
		return net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(dst, port)))
	})
	if err != nil {
		in.Close()
		return nil, err
	}
	l.closers = append(l.closers, out.Close)
	l.running.Go(func() { l.sinkDatagrams(in) })
	l.running.Go(func() { l.sendDatagrams(out, size, perSecond) })
	return l, nil
}

// join makes in, a socket of the host to, join a multicast group on the device dev. It returns the address
// to which the host from sends: the group, with the index of from's dev as its zone.
func join(from, to *lab.Host, dev string, group netip.Addr, in *net.UDPConn) (netip.Addr, error) {
	out, err := from.Link(dev)
	if err != nil {
		return group, err
	}
	l, err := to.Link(dev)
	if err != nil {
		return group, err
	}
	err = ipv6.NewPacketConn(in).JoinGroup(&net.Interface{Index: l.Attrs().Index}, &net.UDPAddr{IP: group.AsSlice()})
	// The zone is a number, because package net caches names of devices without regard to namespaces.
	return group.WithZone(strconv.Itoa(out.Attrs().Index)), err
}

// sinkDatagrams counts the datagrams that arrive, until in is closed.
func (l *background) sinkDatagrams(in *net.UDPConn) {
	buf := make([]byte, 1<<16)
	for {
		n, _, err := in.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			l.octets.Add(uint64(n))
			l.packets.Add(1)
		}
	}
}

func (l *background) sendDatagrams(out *net.UDPConn, size, perSecond int) {
	msg := make([]byte, size)
	start, n := time.Now(), 0
	for {
		select {
		case <-l.end:
			return
		default:
		}
		if perSecond == 0 {
			for range 64 {
				_, _ = out.Write(msg) // an error means that the queue is full, as it should be
			}
			continue
		}
		for due := int(time.Since(start).Seconds() * float64(perSecond)); n < due; n++ {
			_, _ = out.Write(msg)
		}
		time.Sleep(time.Millisecond)
	}
}

// streams sends by TCP from one host to another, over n connections at once.
func (m *mesh) streams(ctx context.Context, from, to, n int) (l *background, err error) {
	l = &background{end: make(chan struct{})}
	ln, err := lab.In(m.hosts[to], func() (net.Listener, error) {
		return net.Listen("tcp", netip.AddrPortFrom(m.addrs[to], 0).String())
	})
	if err != nil {
		return nil, err
	}
	l.closers = append(l.closers, ln.Close)
	var conns []*net.TCPConn
	l.resent = func() (r resent) {
		for _, c := range conns {
			again, sent := retransmitted(c)
			r.again, r.sent = r.again+again, r.sent+sent
		}
		return r
	}
	l.running.Go(func() { l.accept(ln) })
	for range n {
		c, err := lab.In(m.hosts[from], func() (net.Conn, error) {
			return (&net.Dialer{Timeout: 5 * time.Second}).DialContext(ctx, "tcp", ln.Addr().String())
		})
		if err != nil {
			l.stop()
			return nil, fmt.Errorf("connect: %w", err)
		}
		tcp := c.(*net.TCPConn)
		_ = tcp.SetLinger(0) // closing discards the data not sent yet
		conns = append(conns, tcp)
		l.closers = append(l.closers, tcp.Close)
	}
	for _, tcp := range conns {
		l.running.Go(func() {
			block := make([]byte, 256<<10)
			for {
				if _, err := tcp.Write(block); err != nil {
					return
				}
			}
		})
	}
	return l, nil
}

// backgrounds are loads that run at the same time.
type backgrounds []*background

// stop ends the loads.
func (loads backgrounds) stop() {
	for _, l := range loads {
		l.stop()
	}
}

// received returns how many octets of each load have arrived.
func (loads backgrounds) received() (octets []float64) {
	for _, l := range loads {
		octets = append(octets, float64(l.octets.Load()))
	}
	return octets
}

// accept accepts connections until the listener is closed, and reads each until it ends.
func (l *background) accept(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		got := new(atomic.Uint64)
		l.mu.Lock()
		l.each = append(l.each, got)
		l.mu.Unlock()
		l.running.Go(func() {
			defer c.Close()
			buf := make([]byte, 256<<10)
			for {
				_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
				n, err := c.Read(buf)
				l.octets.Add(uint64(n))
				got.Add(uint64(n))
				select {
				case <-l.end:
					return
				default:
				}
				if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
					return
				}
			}
		})
	}
}

// retransmitted returns how many octets a connection has sent again, and how many in all.
func retransmitted(c syscall.Conn) (again, sent uint64) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, 0
	}
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			again, sent = info.Bytes_retrans, info.Bytes_sent
		}
	})
	return again, sent
}
