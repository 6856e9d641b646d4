package ipoib

import (
	"cmp"
	"encoding/binary"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/foreign"
	"ipoibcm/wire/arp"
	"ipoibcm/wire/encap"
	"ipoibcm/wire/mad"
)

// connections is the page of the diagrams.
const connections = "../docs/connections.md"

// A diagram is a sequence diagram in the making.
type diagram struct {
	w      *world
	lines  []string
	seen   int       // lines of the log
	states [2]string // of the connections at each end, as last drawn
}

// draw watches a world of two hosts from now on; b is what the second is called.
func draw(w *world, b string) *diagram {
	d := &diagram{w: w, seen: len(w.log)}
	d.lines = append(d.lines, "participant a as a, 10.0.0.1", "participant b as "+b+", 10.0.0.2")
	d.states = [2]string{"no connection", "no connection"}
	d.state(0)
	d.state(1)
	w.onMAD, w.onFrame = d.message, d.frame
	return d
}

// states names the states of a host's connections, as the CM has them.
func states(n *node) string {
	if n.f == nil || n.dead {
		return ""
	}
	var names []string
	for _, c := range n.f.Conns() {
		if c.State != "IDLE" { // its queue pair is being made
			names = append(names, c.State)
		}
	}
	return cmp.Or(strings.Join(names, " and "), "no connection")
}

// state draws the states of one end if they have changed.
func (d *diagram) state(i int) {
	now := states(d.w.nodes[i])
	if now == "" || now == d.states[i] {
		return
	}
	d.states[i] = now
	d.lines = append(d.lines, fmt.Sprintf("Note %s of %s: %s", []string{"left", "right"}[i], d.w.nodes[i].name, now))
}

// ends returns the index of n, and that of the other end.
func (d *diagram) ends(n *node) (this, other int) {
	if n == d.w.nodes[0] {
		return 0, 1
	}
	return 1, 0
}

var (
	// drawn is what a seed decides: QPNs, communication IDs, waits.
	drawn  = regexp.MustCompile(`, QPN 0x[0-9a-f]{6} to 0x[0-9a-f]{6}| in [0-9.]+m?s at the earliest| \(comm=[^)]*\)`)
	logged = regexp.MustCompile(`^ *[0-9.]+ ([a-z]) (conn|crossing|neighbour) +\S+ \S+ \S+ [0-9]+ (.*)$`)
)

// notes draws what the agents have noted meanwhile.
func (d *diagram) notes() {
	for ; d.seen < len(d.w.log); d.seen++ {
		if m := logged.FindStringSubmatch(d.w.log[d.seen]); m != nil {
			text := strings.ReplaceAll(drawn.ReplaceAllString(m[3], ""), ";", ",") // a semicolon ends a line of Mermaid
			d.lines = append(d.lines, fmt.Sprintf("Note over %s: %s", m[1], text))
		}
	}
}

// say draws what a host does by itself.
func (d *diagram) say(n *node, what string) {
	d.notes()
	d.lines = append(d.lines, fmt.Sprintf("Note over %s: %s", n.name, what))
}

// message draws a CM message.
func (d *diagram) message(from *node, m mad.Message) { d.arrow(from, label(m)) }

// arrow draws what one host sends to the other, and then its states, which it sent that in.
func (d *diagram) arrow(from *node, text string) {
	this, other := d.ends(from)
	d.notes()
	d.state(other)
	arrow := "->>"
	if d.w.nodes[other].dead {
		arrow = "-x"
	}
	d.lines = append(d.lines, from.name+arrow+d.w.nodes[other].name+": "+text)
	d.state(this)
}

// frame draws ARP and what an application sent.
func (d *diagram) frame(from *node, conn bool, fr []byte) {
	by := "UD"
	if conn {
		by = "the connection"
	}
	switch t := encap.EtherType(binary.BigEndian.Uint16(fr)); t {
	case encap.ARP:
		var p arp.Packet
		switch err := p.UnmarshalBinary(fr[encap.HeaderLen:]); {
		case err != nil || p.IsAnnouncement():
		case p.IsProbe():
			d.arrow(from, fmt.Sprintf("ARP probe for %v by %s, duplicate address detection", p.TargetIP, by))
		case p.Op == arp.Request:
			d.arrow(from, fmt.Sprintf("ARP request for %v by %s, from %v", p.TargetIP, by, p.Sender))
		default:
			d.arrow(from, fmt.Sprintf("ARP reply by %s, %v is at %v", by, p.SenderIP, p.Sender))
		}
	case encap.IPv4:
		if n := len(fr) - encap.HeaderLen; n > 1000 { // not the reports of IGMP
			d.arrow(from, fmt.Sprintf("data by %s, IPv4 packet of %d octets", by, n))
		}
	}
}

// label is what counts of a message.
func label(m mad.Message) string {
	var private []byte
	text := m.Attr().String()
	switch m := m.(type) {
	case mad.REQ:
		text, private = fmt.Sprintf("%s to %v by %v", text, m.ServiceID, m.Transport), m.PrivateData[:]
	case mad.REP:
		private = m.PrivateData[:]
	case mad.RTU:
		private = m.PrivateData[:]
	case mad.REJ:
		text, private = fmt.Sprintf("%s %d, %v", text, m.Reason, m.Reason), m.PrivateData[:]
	case mad.MRA:
		private = m.PrivateData[:]
	default:
		return text
	}
	var p encap.PrivateData
	if err := p.UnmarshalBinary(private); err != nil || p.IsZero() {
		return text + ", without private data"
	}
	return fmt.Sprintf("%s, UD QPN %v, Receive MTU %d", text, p.QPN, p.ReceiveMTU)
}

// block is the diagram as Markdown.
func (d *diagram) block() string {
	d.notes()
	d.state(0)
	d.state(1)
	return "```mermaid\nsequenceDiagram\n    " + strings.Join(d.lines, "\n    ") + "\n```\n"
}

// send has the kernel of n send a packet that only a connection carries.
func (d *diagram) send(n *node, dst string) {
	d.say(n, "the kernel sends 9000 octets to "+dst)
	n.ping(dst, 9000, true)
}

// scenes play what the page tells.
var scenes = map[string]func(t *testing.T) *diagram{
	"first packet": func(t *testing.T) *diagram {
		w, a, _ := newPair(t, 1)
		d := draw(w, "b")
		d.send(a, "10.0.0.2")
		w.run(time.Second)
		return d
	},
	"crossing": func(t *testing.T) *diagram {
		w, a, b := newPair(t, 2)
		a.look(b)
		b.look(a)
		w.run(time.Second)
		w.delay = 1
		d := draw(w, "b")
		d.send(a, "10.0.0.2")
		d.send(b, "10.0.0.1")
		w.run(time.Second)
		return d
	},
	"linux": func(t *testing.T) *diagram {
		w, a, k := newLinuxPair(t, 3)
		d := draw(w, "b (Linux)")
		d.send(a, "10.0.0.2")
		w.run(time.Second)
		d.say(k, "it has a packet for 10.0.0.1")
		k.legacy.connect(a)
		w.run(time.Second)
		return d
	},
	"smaller receive MTU": func(t *testing.T) *diagram {
		w := newWorld(t, 4)
		a := w.node(1, Options{})
		w.foreign(2, foreign.Options{Kind: foreign.WinOFED, ReceiveMTU: 4096})
		w.run(2 * time.Second)
		d := draw(w, "b (WinOFED)")
		d.send(a, "10.0.0.2")
		w.run(time.Second)
		return d
	},
	"restart": func(t *testing.T) *diagram {
		w, a, b := newPair(t, 5)
		a.ping("10.0.0.2", 9000, true)
		w.run(time.Second)
		d := draw(w, "b")
		d.say(b, "the process is killed, and started again")
		b.dead = true
		w.run(time.Second)
		b.boot()
		w.run(time.Second)
		d.send(b, "10.0.0.1")
		w.run(time.Second)
		return d
	},
	"down": func(t *testing.T) *diagram {
		w, a, _ := newPair(t, 6)
		a.ping("10.0.0.2", 9000, true)
		w.run(time.Second)
		d := draw(w, "b")
		d.say(a, "ip link set ibcm0 down")
		a.kernel(a.k.Up(false))
		w.run(time.Second)
		return d
	},
}

// TestDiagrams holds docs/connections.md to what the machines do.
func TestDiagrams(t *testing.T) {
	b, err := os.ReadFile(connections)
	if err != nil {
		t.Fatal(err)
	}
	page, played := string(b), 0
	scene := regexp.MustCompile("<!-- scene: (.*) -->\n(\n```mermaid\n[^`]*```\n)?")
	want := scene.ReplaceAllStringFunc(page, func(s string) string {
		name := scene.FindStringSubmatch(s)[1]
		play := scenes[name]
		if play == nil {
			t.Fatalf("there is no scene %q", name)
		}
		played++
		return "<!-- scene: " + name + " -->\n\n" + play(t).block()
	})
	if played != len(scenes) {
		t.Errorf("%d scenes are on the page, want %d", played, len(scenes))
	}
	if want == page {
		return
	}
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(connections, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	t.Errorf("%s does not show what happens: go test ./ipoib -run TestDiagrams -update", connections)
}
