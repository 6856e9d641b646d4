package pathmtu

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"ipoibcm/internal/script"
)

var sizes = []int{1280, 1344, 1424, 2044, 4092}

// A path is a search with the path that it searches.
type path struct {
	s       *Search
	now     time.Time
	carries int // octets; 0: the other end does not answer
	rtt     time.Duration
	lose    int // of this many probes the first is lost, whatever its size; 0: none
	sent    int
	onWay   []answer
}

type answer struct {
	at time.Time
	p  Probe
}

func newPath() *path {
	return &path{s: New(sizes), now: time.Unix(1000, 0), carries: 9000, rtt: time.Millisecond}
}

// put puts probes on the way, and prints their sizes.
func (p *path) put(probes []Probe) (out []string) {
	var octets []string
	for _, pr := range probes {
		octets = append(octets, strconv.Itoa(pr.Octets))
		p.sent++
		if pr.Octets <= p.carries && (p.lose == 0 || p.sent%p.lose != 0) {
			p.onWay = append(p.onWay, answer{p.now.Add(p.rtt), pr})
		}
	}
	if octets != nil {
		out = append(out, "probe "+strings.Join(octets, " "))
	}
	return out
}

func (p *path) size(changed bool) []string {
	if !changed {
		return nil
	}
	return []string{fmt.Sprintf("size %d", p.s.Octets())}
}

func (p *path) Do(line string) ([]string, error) {
	w := strings.Fields(line)
	num := func(i int) int { n, _ := strconv.Atoi(w[i]); return n }
	switch w[0] {
	case "carries":
		p.carries = num(1)
	case "rtt":
		d, err := time.ParseDuration(w[1])
		p.rtt = d
		return nil, err
	case "lose":
		p.lose = num(1)
	case "limit":
		p.s.Limit(num(1))
	case "raise":
		return p.put(p.s.Raise(nil, p.now, 0xabcde00)), nil
	case "start":
		return p.put(p.s.Start(nil, p.now, 0x1234500)), nil
	case "used":
		return p.put(p.s.Used(nil, p.now, 0x6789a00)), nil
	case "status":
		return []string{fmt.Sprintf("%v %d lowered=%v raise=%v", p.s.State(), p.s.Octets(), p.s.Lowered(),
			p.s.RaiseDue(p.now))}, nil
	default:
		return nil, fmt.Errorf("unknown line %q", line)
	}
	return nil, nil
}

func (p *path) Pass(d time.Duration) (out []string) {
	for end := p.now.Add(d); ; {
		due := p.s.Deadline()
		i := -1
		for k, a := range p.onWay {
			if !a.at.After(end) && (i < 0 || a.at.Before(p.onWay[i].at)) {
				i = k
			}
		}
		switch {
		case i >= 0 && (due.IsZero() || !p.onWay[i].at.After(due)):
			a := p.onWay[i]
			p.onWay = slices.Delete(p.onWay, i, i+1)
			p.now = a.at
			_, changed := p.s.Answer(p.now, a.p)
			out = append(out, p.size(changed)...)
		case !due.IsZero() && !due.After(end):
			if due.After(p.now) {
				p.now = due
			}
			probes, changed := p.s.Wake(nil, p.now)
			out = append(append(out, p.size(changed)...), p.put(probes)...)
		default:
			p.now = end
			return out
		}
	}
}

func TestScripts(t *testing.T) {
	script.Run(t, "testdata/*.txt", func(*testing.T) script.Machine { return newPath() })
}

// An answer counts only if it has an ID that was sent, and a size.
func TestForgedAnswers(t *testing.T) {
	p := newPath()
	probes := p.s.Start(nil, p.now, 0x1234500)
	for _, tt := range []struct {
		name string
		p    Probe
		want bool
	}{
		{"another ID", Probe{1280, probes[0].ID ^ 1<<40}, false},
		{"of a round to come", Probe{1280, probes[0].ID + 1}, false},
		{"a size that is none", Probe{1500, probes[0].ID}, false},
		{"ID zero", Probe{1280, 0}, false},
		{"as it was sent", probes[1], true},
	} {
		if got, _ := p.s.Answer(p.now, tt.p); got != tt.want {
			t.Errorf("%s: taken for an answer %v, want %v", tt.name, got, tt.want)
		}
	}
}

// Whatever comes and in which order, the size is one of those, a search ends, and a round
// has no more probes than there are sizes.
func FuzzSearch(f *testing.F) {
	f.Add(uint64(1), []byte{0, 1, 2, 3, 4, 5, 6, 7, 255})
	f.Fuzz(func(t *testing.T, seed uint64, ops []byte) {
		s, now := New(sizes), time.Unix(1, 0)
		var sent []Probe
		take := func(ps []Probe) {
			if len(ps) > len(sizes) {
				t.Fatalf("%d probes at once, want %d at most", len(ps), len(sizes))
			}
			sent = append(sent, ps...)
		}
		for _, op := range ops {
			now = now.Add(time.Duration(op>>4) * 50 * time.Millisecond)
			switch op & 7 {
			case 0:
				take(s.Start(nil, now, seed))
			case 1:
				take(s.Used(nil, now, seed+1<<9))
			case 2:
				s.Limit(sizes[op>>3&3])
			case 3:
				take(s.Raise(nil, now, seed+2<<9))
			case 4, 5:
				if len(sent) > 0 {
					s.Answer(now, sent[int(op>>3)*7%len(sent)])
				}
			default:
				ps, _ := s.Wake(nil, now)
				take(ps)
			}
			if !slices.Contains(sizes, s.Octets()) {
				t.Fatalf("size %d, which is none", s.Octets())
			}
		}
		for range 2 * maxRounds {
			if now = s.Deadline(); now.IsZero() {
				return
			}
			s.Wake(nil, now)
		}
		t.Fatal("the search does not end")
	})
}
