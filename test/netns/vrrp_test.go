package netns

import (
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"
)

// moveWithin is how long the virtual address may be without service when it moves.
const moveWithin = 3 * time.Second

// pair is two hosts that share virtual addresses by VRRP, and a client.
type vrrpPair struct {
	*segment
	client     *host
	keepalived string
	daemons    map[*host]*daemon
	mouth      *mouth
}

// newVRRP starts agents with args, and no keepalived.
func newVRRP(t *testing.T, args ...string) *vrrpPair {
	needIP(t)
	program := needProgram(t, "keepalived", "keepalived", "/usr/sbin/keepalived")
	s := newSegment(t, topology{hosts: 3})
	s.start(args...)
	p := &vrrpPair{segment: s, client: s.hosts[2], keepalived: program, daemons: map[*host]*daemon{}}
	p.mouth = p.client.speak()
	for _, h := range s.hosts {
		h.probed()
	}
	return p
}

// vrrp starts keepalived on a host.
func (p *vrrpPair) vrrp(h *host) {
	p.Helper()
	conf := h.file("keepalived.conf", strings.ReplaceAll(documented(p.T, "keepalived"), "PRIORITY",
		fmt.Sprint(200-50*h.i)))
	d := h.dir()
	// of one that was killed: its number may be another's by now
	for _, pid := range []string{"/keepalived.pid", "/vrrp.pid"} {
		_ = os.Remove(d + pid)
	}
	p.daemons[h] = h.daemon(p.keepalived, "-n", "-l", "-D", "-P", "-f", conf, "-p", d+"/keepalived.pid", "-r",
		d+"/vrrp.pid")
}

// serves waits until the client's datagrams to both virtual addresses reach one
// host, and tells how long each took.
func (p *vrrpPair) serves(what string, within time.Duration, want *ear) {
	p.Helper()
	w := p.stopwatch()
	defer w.watchRTNL(p.client)()
	for _, dst := range []string{"10.0.0.100", "fd00::100"} {
		p.eventuallyBy(w, max(within, patience), what+": "+want.host.Name+" serves "+dst, func() error {
			id, err := p.mouth.say(netip.MustParseAddr(dst))
			if err != nil {
				return err
			}
			for end := time.Now().Add(50 * time.Millisecond); time.Now().Before(end); time.Sleep(pollEvery) {
				if want.heard(id) {
					return nil
				}
			}
			return fmt.Errorf("not heard there")
		})
		p.Logf("%s: %s after %v", what, dst, time.Since(w.began))
	}
	if err := w.over(within); err != nil {
		p.Errorf("%s: %s serves: %v", what, want.host.Name, err)
	}
}

// A virtual address moves to the other host when agent and keepalived of its
// master die, and back when they are there again.
func TestKeepalived(t *testing.T) {
	parallel(t)
	p := newVRRP(t)
	a, b := p.hosts[0], p.hosts[1]
	atA, atB := a.listen(), b.listen()
	p.vrrp(a)
	p.vrrp(b)
	p.serves("at the beginning", 20*time.Second, atA)
	for range 2 {
		p.daemons[a].kill()
		a.kill()
		p.serves("the master has died", moveWithin, atB)
		a.run()
		p.vrrp(a)
		p.serves("it is back", patience, atA) // its own start included
	}
}

// Where keepalived alone dies its addresses stay, on both hosts then: the client, which
// believes announcements, uses the one that announced them last.
func TestKeepalivedAloneDies(t *testing.T) {
	parallel(t)
	p := newVRRP(t, "--arp-accept", "always")
	a, b := p.hosts[0], p.hosts[1]
	atA, atB := a.listen(), b.listen()
	p.vrrp(a)
	p.vrrp(b)
	p.serves("at the beginning", 20*time.Second, atA)
	p.daemons[a].kill()
	p.serves("keepalived of the master has died", moveWithin, atB)
	if got := a.ip("addr show dev " + ifName); !strings.Contains(got, "10.0.0.100/") {
		t.Errorf("the address did not stay where it was:\n%s", got)
	}
	p.vrrp(a)
	p.serves("it is back", patience, atA)
}
