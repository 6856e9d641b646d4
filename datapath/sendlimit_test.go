package datapath

import (
	"testing"
	"time"
)

// A link is what a sendLimit is measured on: a rate, a round trip, and moments at
// which whoever takes completions in is busy elsewhere.
type link struct {
	rate   float64 // octets per second
	rtt    time.Duration
	octets int64 // of each request
	depth  int   // requests that the QP takes
	stall  time.Duration
	every  time.Duration // between two stalls; 0: none
	gap    bool          // a stall is a packet that is sent again: one request completes, all behind it a moment later
}

// run sends over k as much as the limit allows, for d of time. It returns octets per
// second after the first second, and the longest that a request was on its way then.
func (k link) run(s *sendLimit, d time.Duration) (rate float64, longest time.Duration) {
	type request struct{ posted, done int64 }
	var flight []request
	var now, free, octets, id int64 = 1, 0, 0, 0
	nextStall := int64(k.every)
	s.posted(0, 60, 60, 0) // a SYN: one short request by itself
	s.completed(0, 60, int64(k.rtt))
	for now < int64(d) {
		for s.limit() > octets && len(flight) < k.depth {
			free = max(free, now) + int64(float64(k.octets)*1e9/k.rate)
			flight = append(flight, request{now, free + int64(k.rtt)})
			octets += k.octets
			id++
			s.posted(uint64(id), k.octets, octets, now)
		}
		s.full()
		now = max(now, flight[0].done)
		most := len(flight)
		if k.every > 0 && now > nextStall {
			now, nextStall = now+int64(k.stall), now+int64(k.stall+k.every)
			if k.gap {
				most = 1
			}
		}
		n := 0
		for n < most && flight[n].done <= now {
			if now > int64(time.Second) {
				longest = max(longest, time.Duration(now-flight[n].posted))
				rate += float64(k.octets)
			}
			n++
		}
		done := id - int64(len(flight)) + int64(n)
		flight = flight[n:]
		octets -= int64(n) * k.octets
		s.completed(uint64(done), int64(n)*k.octets, now)
	}
	return rate / (d - time.Second).Seconds(), longest
}

// On a slow link little is posted, and nothing is lost of its rate; on a long one as
// much as it holds; on a fast one so much that a pause of the processor does not matter.
func TestSendLimit(t *testing.T) {
	for _, tt := range []struct {
		name     string
		link     link
		share    float64       // of the rate, at least
		longest  time.Duration // beyond round trip and one request, at most
		longTime time.Duration
	}{
		{"20 Mb/s, datagrams", link{rate: 2.5e6, rtt: 200 * time.Microsecond, octets: 1452, depth: 128}, 0.95,
			8 * time.Millisecond, 5 * time.Second},
		{"20 Mb/s, packets of 64 KB", link{rate: 2.5e6, rtt: 200 * time.Microsecond, octets: 65524, depth: 128}, 0.95,
			30 * time.Millisecond, 20 * time.Second},
		{"300 Mb/s, packets of 64 KB", link{rate: 37.5e6, rtt: 200 * time.Microsecond, octets: 65524, depth: 128},
			0.98, 10 * time.Millisecond, 5 * time.Second},
		{"40 ms, 230 Mb/s", link{rate: 29e6, rtt: 40 * time.Millisecond, octets: 65524, depth: 128}, 0.95,
			60 * time.Millisecond, 20 * time.Second},
		{"10 ms, 1 Gb/s", link{rate: 125e6, rtt: 10 * time.Millisecond, octets: 65524, depth: 128}, 0.95,
			20 * time.Millisecond, 20 * time.Second},
		{"16 Gb/s, nobody else", link{rate: 2e9, rtt: 50 * time.Microsecond, octets: 65524, depth: 128}, 0.98,
			8 * time.Millisecond, 3 * time.Second},
		{"16 Gb/s, 3 ms elsewhere after each 5", link{rate: 2e9, rtt: 50 * time.Microsecond, octets: 65524, depth: 128,
			stall: 3 * time.Millisecond, every: 5 * time.Millisecond}, 0.90, 12 * time.Millisecond, 5 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var s sendLimit
			rate, longest := tt.link.run(&s, tt.longTime)
			if got := rate / tt.link.rate; got < tt.share {
				t.Errorf("%.3f of the link's rate, want %.2f", got, tt.share)
			}
			one := tt.link.rtt + time.Duration(float64(tt.link.octets)*1e9/tt.link.rate)
			if longest > one+tt.longest {
				t.Errorf("a request was on its way for %v, want %v at most", longest, one+tt.longest)
			}
		})
	}
}

// What a path could carry before says nothing when it becomes slow: within two
// windows the limit is what it carries now.
func TestSendLimitFollows(t *testing.T) {
	var s sendLimit
	fast := link{rate: 1e9, rtt: 100 * time.Microsecond, octets: 65524, depth: 128}
	fast.run(&s, 3*time.Second)
	if got := s.limit(); got < 1<<20 {
		t.Errorf("limit %d on the fast link, want a megabyte at least", got)
	}
	s.reset()
	slow := link{rate: 2.5e6, rtt: 100 * time.Microsecond, octets: 1452, depth: 128}
	if _, longest := slow.run(&s, 5*time.Second); longest > 80*time.Millisecond {
		t.Errorf("a request was on its way for %v after a second, want 80 ms at most", longest)
	}
	if got := s.limit(); got > 64<<10 {
		t.Errorf("limit %d after five seconds on the slow link, want 64 KB at most", got)
	}
}

// Who has little to send is not limited by what that took.
func TestSendLimitOfTheIdle(t *testing.T) {
	var s sendLimit
	now := int64(1)
	for id := range uint64(1000) {
		s.posted(id, 100, 0, now)
		now += int64(20 * time.Millisecond) // as from a host that has gone to sleep
		s.completed(id, 100, now)
	}
	if got := s.limit(); got != firstLimit {
		t.Errorf("limit %d, want %d", got, firstLimit)
	}
}

// What a packet that is sent again lets through at once is no rate of the path.
func TestSendLimitRate(t *testing.T) {
	for _, every := range []time.Duration{15 * time.Millisecond, 25 * time.Millisecond, 40 * time.Millisecond, 100 * time.Millisecond} {
		var s sendLimit
		k := link{rate: 37.5e6, rtt: 200 * time.Microsecond, octets: 61444, depth: 128,
			stall: 12 * time.Millisecond, every: every, gap: true}
		k.run(&s, 5*time.Second)
		if got := float64(s.rate()) / k.rate; got < 0.9 || got > 1.6 {
			t.Errorf("a gap every %v: a rate of %.2f of the path's, want 0.9 to 1.6", every, got)
		}
	}
}
