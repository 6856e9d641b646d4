package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"ipoibcm/internal/lab"
)

func needIP(t *testing.T) {
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("ip (iproute2) is not installed: what it does is not tried")
	}
}

// ip runs ip with the words of line, and returns what it printed.
func (h *host) ip(line string) string {
	h.seg.Helper()
	out, err := h.tryIP(line)
	h.seg.must(err)
	return out
}

func (h *host) tryIP(line string) (string, error) { return hostIP(h.Host, line) }

func hostIP(h *lab.Host, line string) (string, error) {
	out, err := h.Output(exec.Command("ip", strings.Fields(line)...))
	if err != nil {
		return "", fmt.Errorf("ip %s in %s: %w: %s", line, h.Name, err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// exactly returns the routes to a prefix or address.
func (h *host) exactly(dst string) (string, error) {
	flag := "-4"
	if strings.Contains(dst, ":") {
		flag = "-6" // not guessed from the address
	}
	return h.tryIP(flag + " -d route show exact " + dst)
}

// An ear hears datagrams to any address that is local to its host.
type ear struct {
	host *host
	conn *net.UDPConn
	mu   sync.Mutex
	got  map[uint32]bool
}

const earPort = 40756

// listen opens an ear, until the test ends.
func (h *host) listen() *ear {
	h.seg.Helper()
	e := &ear{host: h, got: map[uint32]bool{}}
	h.seg.must(h.Do(func() (err error) {
		e.conn, err = net.ListenUDP("udp", &net.UDPAddr{Port: earPort})
		return err
	}))
	var wg sync.WaitGroup
	wg.Go(func() {
		b := make([]byte, 64)
		for {
			n, _, err := e.conn.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			if n == 4 {
				e.mu.Lock()
				e.got[binary.BigEndian.Uint32(b)] = true
				e.mu.Unlock()
			}
		}
	})
	h.seg.Cleanup(wg.Wait)
	h.seg.Cleanup(func() { e.conn.Close() })
	return e
}

func (e *ear) heard(id uint32) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.got[id]
}

// A mouth sends numbered datagrams.
type mouth struct {
	seg  *segment
	conn *net.UDPConn
	next uint32
}

func (h *host) speak() *mouth {
	h.seg.Helper()
	m := &mouth{seg: h.seg}
	h.seg.must(h.Do(func() (err error) {
		m.conn, err = net.ListenUDP("udp", nil)
		return err
	}))
	h.seg.Cleanup(func() { m.conn.Close() })
	return m
}

// say sends one datagram, and returns its number.
func (m *mouth) say(dst netip.Addr) (uint32, error) {
	m.next++
	_, err := m.conn.WriteToUDPAddrPort(binary.BigEndian.AppendUint32(nil, m.next), netip.AddrPortFrom(dst, earPort))
	return m.next, err
}

// carrier returns the ear that hears a datagram to dst, nil if none does.
func (m *mouth) carrier(dst netip.Addr, ears ...*ear) *ear {
	m.seg.Helper()
	for range 10 {
		id, err := m.say(dst)
		m.seg.must(err)
		for end := time.Now().Add(200 * time.Millisecond); time.Now().Before(end); time.Sleep(pollEvery) {
			for _, e := range ears {
				if e.heard(id) {
					return e
				}
			}
		}
	}
	return nil
}

// wantCarrier waits until datagrams to dst reach one host and no other: what was
// on its way before a change may still go where it went.
func (m *mouth) wantCarrier(what string, dst netip.Addr, want *ear, others ...*ear) {
	m.seg.Helper()
	m.seg.eventually(patience, what, func() error {
		switch got := m.carrier(dst, append(others, want)...); got {
		case want:
			return nil
		case nil:
			return errors.New("nobody hears " + dst.String())
		default:
			return fmt.Errorf("%s goes to %s, want %s", dst, got.host.Name, want.host.Name)
		}
	})
	for range 5 {
		if got := m.carrier(dst, append(others, want)...); got != want {
			m.seg.Errorf("%s: later %s goes elsewhere", what, dst)
		}
	}
}

// other gives h one more device, "eth1", with addresses, to a host of its own
// whose end is "far".
func (s *segment) other(h *host, addrs ...string) *lab.Host {
	s.Helper()
	far, err := lab.NewHost(fmt.Sprintf("%s%d-%do", namePrefix, os.Getpid(), serial.Add(1)))
	s.must(err)
	s.Cleanup(func() { far.Close() })
	s.must(lab.Connect(h.Host, "eth1", far, "far", 1500))
	for _, a := range addrs {
		s.must(h.AddAddr("eth1", a))
	}
	return far
}
