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
	// fewDests is so many that no two datagrams of a batch have the same destination. Those of one destination are put
	// together for the receiver's TUN, as those of any flow are.
	fewDests = destBatch
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
	fewDest     = "64 destinations"
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
		{name: fmt.Sprintf("%d destinations behind a gateway of %d", manyDests, fewDests),
			num: at.key(testDests, manyDest, oursRC), den: at.key(testDests, fewDest, oursRC), bound: 0.90},
		{name: learnRate, num: at.key(testLearned, learnRate, oursRC), bound: 20_000, unit: "per second"},
	}
}

// A sprayer sends datagrams to destinations in turn, and counts what arrives.
type sprayer struct {
	out   *ipv4.PacketConn
	in    *ipv4.PacketConn
	msgs  []ipv4.Message
	dests int
	next  int
	got   atomic.Int64 // octets
	done  chan struct{}
}

func newSprayer(from, to *lab.Host) (s *sprayer, err error) {
	out, err := lab.In(from, func() (*net.UDPConn, error) { return net.ListenUDP("udp4", nil) })
	if err != nil {
		return nil, err
	}
	in, err := lab.In(to, func() (*net.UDPConn, error) { return net.ListenUDP("udp4", &net.UDPAddr{Port: destPort}) })
	if err != nil {
		return nil, err
	}
	if err := in.SetReadBuffer(4 << 20); err != nil {
		return nil, err
	}
	s = &sprayer{out: ipv4.NewPacketConn(out), in: ipv4.NewPacketConn(in), msgs: destMessages(),
		done: make(chan struct{})}
	go s.receive()
	return s, nil
}

// destMessages returns one batch of messages.
func destMessages() (msgs []ipv4.Message) {
	for range destBatch {
		msgs = append(msgs, ipv4.Message{Buffers: [][]byte{make([]byte, destSize)}, Addr: &net.UDPAddr{Port: destPort}})
	}
	return msgs
}

func (s *sprayer) close() {
	s.out.Close()
	s.in.Close()
	<-s.done
}

func (s *sprayer) receive() {
	defer close(s.done)
	msgs := destMessages()
	for {
		n, err := s.in.ReadBatch(msgs, 0)
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

// destinations measures the cost of very many destinations behind one gateway, and what they cost the
// sender's program and the two kernels alone.
func (b *bench) destinations(ctx context.Context) error {
	for round := range b.rounds {
		for _, contender := range []string{raw, oursRC} {
			if err := b.destRound(ctx, contender, round); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *bench) destRound(ctx context.Context, contender string, round int) error {
	b.say("round %d of %d: %d destinations, %s", round+1, b.rounds, manyDests, contender)
	m, err := b.newMesh(ctx, contender, meshKind{at: setupPlace, size: 2, veth: true, traffic: family4})
	if err != nil {
		return err
	}
	defer m.close()
	from, to := m.hosts[meshSender], m.hosts[meshPeer]
	dev := "ibcm0"
	if contender == raw {
		dev = "eth0" // whose addresses may be of IPv6
		if err := errors.Join(from.AddAddr(dev, m.inner(meshSender)), to.AddAddr(dev, m.inner(meshPeer))); err != nil {
			return err
		}
	}
	if err := errors.Join(from.AddRoute(dev, behind.String(), addr(m.inner(meshPeer)).String()),
		to.AddAddr("lo", behind.String())); err != nil {
		return err
	}
	s, err := newSprayer(from, to)
	if err != nil {
		return err
	}
	m.onClose(s.close)
	if contender != raw {
		if err := b.destLearn(ctx, m, s); err != nil {
			return err
		}
	}
	return b.destGoodput(m, s, round)
}

// destLearn measures what it costs an agent to learn all destinations.
func (b *bench) destLearn(ctx context.Context, m *mesh, s *sprayer) error {
	agent := m.agents[meshSender]
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
	b.r.add(m.key(testLearned, learnRate), "/s", manyDests/(learned-cpu).Seconds())
	b.r.add(m.key(testLearned, perDest), "octets", (after.resident-before.resident)/manyDests)
	return nil
}

func (b *bench) destGoodput(m *mesh, s *sprayer, round int) error {
	d := b.transferTime(0)
	if _, err := s.goodput(1, d/4); err != nil { // the very first transfer is slower than others
		return err
	}
	order := []struct {
		variant string
		dests   int
	}{{oneDest, 1}, {fewDest, fewDests}, {manyDest, manyDests}}
	if round%2 == 1 {
		slices.Reverse(order)
	}
	for _, o := range order {
		mbps, err := s.goodput(o.dests, d)
		if err != nil {
			return err
		}
		b.r.add(m.key(testDests, o.variant), "Mb/s", mbps)
	}
	return nil
}
