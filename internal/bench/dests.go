package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"

	"ipoibcm/control"
	"ipoibcm/internal/lab"
)

// Many destinations: there are two hosts. The second one has all addresses of the network
// [behind], so that each packet of the first may have another destination.
const (
	manyDests = 200_000
	// destSize is a datagram's payload: large enough that moving octets matters, small
	// enough that looking up destinations does.
	destSize = 8000
	// learnPace is how many destinations per second [sprayer.learn] sends to at most: 1.5
	// times as many as the target wants an agent to learn.
	learnPace = 30_000
	// learnWithin bounds the wait until the agent knows all destinations.
	learnWithin = 2 * time.Minute
	destBatch   = 64 // datagrams of one system call
	destPort    = 40757

	oneDest     = "1 destination"
	manyDest    = "200000 destinations"
	learnRate   = "new destinations per second of one processor"
	perDest     = "resident memory per destination"
	testDests   = "destinations"
	testLearned = "destinations learned"
)

// behind is the network behind the second host (RFC 6598).
var behind = netip.MustParsePrefix("100.64.0.0/14")

// destAddr returns the address of destination i.
func destAddr(i int) netip.Addr {
	b := behind.Addr().As4()
	binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+1+uint32(i))
	return netip.AddrFrom4(b)
}

func destTargets() []target {
	at := setupPlace
	return []target{
		{name: fmt.Sprintf("%d destinations behind a gateway of one", manyDests),
			num: at.key(testDests, manyDest, oursRC), den: at.key(testDests, oneDest, oursRC), bound: 0.90},
		{name: learnRate, num: at.key(testLearned, learnRate, oursRC), bound: 20_000, unit: "per second"},
	}
}

// A sprayer sends datagrams to destinations in turn, and counts what arrives.
type sprayer struct {
	out   *ipv4.PacketConn
	in    *net.UDPConn
	msgs  []ipv4.Message
	dests int
	next  int
	got   atomic.Int64 // octets
	done  chan struct{}
}

func newSprayer(from, to *lab.Host) (s *sprayer, err error) {
	s = &sprayer{done: make(chan struct{})}
	var out *net.UDPConn
	err = from.Do(func() (err error) {
		out, err = net.ListenUDP("udp4", nil)
		return err
	})
	if err == nil {
		err = to.Do(func() (err error) {
			s.in, err = net.ListenUDP("udp4", &net.UDPAddr{Port: destPort})
			return err
		})
	}
	if err != nil {
		return nil, err
	}
	s.out = ipv4.NewPacketConn(out)
	if err := s.in.SetReadBuffer(4 << 20); err != nil {
		return nil, err
	}
	for range destBatch {
		s.msgs = append(s.msgs, ipv4.Message{Buffers: [][]byte{make([]byte, destSize)}, Addr: &net.UDPAddr{Port: destPort}})
	}
	go s.receive()
	return s, nil
}

func (s *sprayer) close() {
	s.out.Close()
	s.in.Close()
	<-s.done
}

func (s *sprayer) receive() {
	defer close(s.done)
	in := ipv4.NewPacketConn(s.in)
	msgs := make([]ipv4.Message, destBatch)
	for i := range msgs {
		msgs[i].Buffers = [][]byte{make([]byte, destSize)}
	}
	for {
		n, err := in.ReadBatch(msgs, 0)
		if err != nil {
			return
		}
		sum := 0
		for _, m := range msgs[:n] {
			sum += m.N
		}
		s.got.Add(int64(sum))
	}
}

// send sends one batch of datagrams of size octets to the next destinations.
func (s *sprayer) send(size int) error {
	for i := range s.msgs {
		a := destAddr(s.next).As4()
		s.msgs[i].Addr.(*net.UDPAddr).IP = append(s.msgs[i].Addr.(*net.UDPAddr).IP[:0], a[:]...)
		s.msgs[i].Buffers[0] = s.msgs[i].Buffers[0][:size]
		if s.next++; s.next >= s.dests {
			s.next = 0
		}
	}
	for rest := s.msgs; len(rest) > 0; {
		n, err := s.out.WriteBatch(rest, 0)
		if err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, unix.EAGAIN) {
			return err
		}
		rest = rest[max(n, 1):]
	}
	return nil
}

// goodput sends to that many destinations for d, as fast as possible, and returns what arrived, in Mb/s.
func (s *sprayer) goodput(dests int, d time.Duration) (float64, error) {
	s.dests, s.next = dests, 0
	before, start := s.got.Load(), time.Now()
	for time.Since(start) < d {
		if err := s.send(destSize); err != nil {
			return 0, err
		}
	}
	return float64(s.got.Load()-before) * 8 / time.Since(start).Seconds() / 1e6, nil
}

// learn sends to every destination until the agent knows them all.
func (s *sprayer) learn(ctx context.Context, a *lab.Agent) error {
	s.dests, s.next = manyDests, 0
	start := time.Now()
	for sent := 0; ; {
		for until := sent + manyDests; sent < until; sent += destBatch {
			if err := s.send(64); err != nil {
				return err
			}
			time.Sleep(time.Until(start.Add(time.Duration(sent) * time.Second / learnPace)))
		}
		var r control.Routes
		if err := a.Get(ctx, control.PathRoutes, &r); err != nil {
			return err
		}
		if r.Destinations >= manyDests {
			return nil
		}
		if time.Since(start) > learnWithin {
			return fmt.Errorf("the agent knows %d of %d destinations after %v", r.Destinations, manyDests, learnWithin)
		}
	}
}

// destinations measures the cost of very many destinations behind one gateway.
func (b *bench) destinations(ctx context.Context) error {
	at := setupPlace
	for round := range b.rounds {
		if err := b.destRound(ctx, at, round); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) destRound(ctx context.Context, at place, round int) error {
	b.say("round %d of %d: %d destinations", round+1, b.rounds, manyDests)
	p := &pair{contender: oursRC, src: addr(inners(family4)[0]), dst: addr(inners(family4)[1])}
	defer p.close()
	if err := p.makeHosts(b); err != nil {
		return err
	}
	if err := lab.Connect(p.hosts[0], "eth0", p.hosts[1], "eth0", at.mtu); err != nil {
		return err
	}
	for i, h := range p.hosts {
		if err := h.AddAddr("eth0", underlays(family6)[i]); err != nil {
			return err
		}
		a, err := b.startAgent(ctx, h, "--gid", addr(underlays(family6)[i]).String(), "--address", inners(family4)[i])
		if err != nil {
			return err
		}
		p.agents[i] = a
		p.onClose(a.Kill)
	}
	if err := p.wait(ctx); err != nil {
		return err
	}
	if err := errors.Join(p.hosts[0].AddRoute("ibcm0", behind.String(), p.dst.String()),
		p.hosts[1].AddAddr("lo", behind.String())); err != nil {
		return err
	}
	s, err := newSprayer(p.hosts[0], p.hosts[1])
	if err != nil {
		return err
	}
	p.onClose(s.close)
	return b.destMeasure(ctx, p, s, at, round)
}

func (b *bench) destMeasure(ctx context.Context, p *pair, s *sprayer, at place, round int) error {
	agent := p.agents[0]
	before, err := readMemory(ctx, agent)
	if err != nil {
		return err
	}
	cpu, err := processCPU(agent.PID())
	if err != nil {
		return err
	}
	if err := s.learn(ctx, agent); err != nil {
		return err
	}
	learned, err := processCPU(agent.PID())
	if err != nil {
		return err
	}
	after, err := readMemory(ctx, agent)
	if err != nil {
		return err
	}
	key := func(test, variant string) Key { return at.key(test, variant, oursRC) }
	d := time.Duration(b.seconds) * time.Second
	if _, err := s.goodput(1, d/4); err != nil { // the very first transfer is slower than others
		return err
	}
	order := []int{1, manyDests}
	if round%2 == 1 {
		slices.Reverse(order)
	}
	for _, n := range order {
		mbps, err := s.goodput(n, d)
		if err != nil {
			return err
		}
		variant := oneDest
		if n > 1 {
			variant = manyDest
		}
		b.r.add(key(testDests, variant), "Mb/s", mbps)
	}
	b.r.add(key(testLearned, learnRate), "/s", manyDests/(learned-cpu).Seconds())
	b.r.add(key(testLearned, perDest), "octets", (after.resident-before.resident)/manyDests)
	return nil
}
