package doctor

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// A Verdict is what a firewall does with the first RoCEv2 packet from or to a peer.
type Verdict uint8

// Verdicts.
const (
	VerdictAccept Verdict = iota
	VerdictMaybe          // rules decide by what cannot be known here: addresses, marks, sets
	VerdictDrop
)

// A Ruleset is what "nft --json list ruleset" prints. Rules that iptables-nft made are in
// it, but their conditions can mostly not be read.
type Ruleset struct {
	chains map[chainKey]*nftChain
}

type chainKey struct{ family, table, name string }

type nftChain struct {
	key    chainKey
	hook   string
	prio   int
	policy string
	rules  []nftRule
}

type nftRule struct {
	handle int
	expr   []map[string]json.RawMessage
}

// A RoCEPacket is what rules are asked about: UDP to port 4791.
type RoCEPacket struct {
	Hook   string // input or output
	Device string // the packet comes in or goes out by it
	IPv6   bool
	User   []any // who sends the packet: a name, a uid as float64, or both
}

// ParseRuleset reads a ruleset. It leaves out objects that it does not know.
func ParseRuleset(b []byte) (*Ruleset, error) {
	var doc struct {
		Objects []struct {
			Chain *struct {
				Family, Table, Name, Hook, Policy string
				Prio                              int
			}
			Rule *struct {
				Family, Table, Chain string
				Handle               int
				Expr                 []map[string]json.RawMessage
			}
		} `json:"nftables"`
	}
	if err := json.Unmarshal(b, &doc); err != nil {
		return nil, fmt.Errorf("read the firewall's rules: %w", err)
	}
	s := &Ruleset{chains: map[chainKey]*nftChain{}}
	for _, o := range doc.Objects {
		if c := o.Chain; c != nil {
			k := chainKey{c.Family, c.Table, c.Name}
			s.chains[k] = &nftChain{key: k, hook: c.Hook, prio: c.Prio, policy: c.Policy}
		}
	}
	for _, o := range doc.Objects {
		if r := o.Rule; r != nil {
			if c := s.chains[chainKey{r.Family, r.Table, r.Chain}]; c != nil {
				c.rules = append(c.rules, nftRule{r.Handle, r.Expr})
			}
		}
	}
	return s, nil
}

// Verdict returns what the rules do with a packet. why is the rule or policy that drops it or may drop it;
// empty if they accept it.
func (s *Ruleset) Verdict(p RoCEPacket) (v Verdict, why string) {
	var base []*nftChain
	for _, c := range s.chains {
		ip := c.key.family == "inet" || c.key.family == "ip" && !p.IPv6 || c.key.family == "ip6" && p.IPv6
		if ip && c.hook == p.Hook {
			base = append(base, c)
		}
	}
	slices.SortFunc(base, func(a, b *nftChain) int {
		return cmp.Or(a.prio-b.prio, strings.Compare(fmt.Sprint(a.key), fmt.Sprint(b.key)))
	})
	for _, c := range base { // each chain may drop what the others accept
		w := &walk{set: s, p: p, budget: maxRules}
		got := w.chain(c, 0)
		if got == goesOn && c.policy == "drop" {
			got, w.why = drops, fmt.Sprintf("policy of chain %s", c.name())
		}
		switch {
		case got == drops && !w.mayAccept:
			return VerdictDrop, w.why
		case got == drops && v == VerdictAccept:
			v, why = VerdictMaybe, w.why
		case w.mayDrop != "" && v == VerdictAccept:
			v, why = VerdictMaybe, w.mayDrop
		}
	}
	return v, why
}

func (c *nftChain) name() string {
	return strings.Join([]string{c.key.family, c.key.table, c.key.name}, " ")
}

// Bounds of a walk: the rules that are looked at, and the depth of chains in chains (the kernel has 16).
const maxRules, maxChains = 100_000, 16

// A walk follows a packet through one base chain.
type walk struct {
	set       *Ruleset
	p         RoCEPacket
	budget    int
	why       string // the rule or policy that drops the packet
	mayDrop   string // the first rule that drops the packet if conditions hold that cannot be known
	mayAccept bool
}

// An end is what becomes of a packet at the end of a chain or a rule.
type end uint8

const (
	goesOn end = iota
	accepts
	drops
	returns
)

// endsByKind are the ends of statements that lead to no other chain.
var endsByKind = map[string]end{"accept": accepts, "queue": accepts, "drop": drops, "reject": drops, "return": returns}

func (w *walk) chain(c *nftChain, depth int) end {
	if c == nil || depth > maxChains {
		return goesOn
	}
	for i := range c.rules {
		if w.budget--; w.budget < 0 {
			return goesOn
		}
		switch e := w.rule(c, &c.rules[i], depth); e {
		case goesOn:
		case returns:
			return goesOn
		default:
			return e
		}
	}
	return goesOn
}

// rule goes through the conditions and statements of r in their order.
func (w *walk) rule(c *nftChain, r *nftRule, depth int) end {
	sure := yes
	for _, x := range r.expr {
		for kind, raw := range x {
			switch kind {
			case "match":
				sure = min(sure, w.match(raw))
			case "xt":
				sure = min(sure, unsure)
				if refusesXT(raw) {
					return w.take(drops, sure, c, r)
				}
			case "limit", "fib", "quota", "ct count":
				sure = min(sure, unsure)
			case "vmap":
				if e := w.vmap(c, r, raw, sure, depth); e != goesOn {
					return e
				}
			case "accept", "drop", "reject", "return", "jump", "goto", "queue":
				if sure == no {
					return goesOn
				}
				return w.take(w.verdict(c, kind, raw, depth), sure, c, r)
			}
			if sure == no {
				return goesOn
			}
		}
	}
	return goesOn
}

// take returns the end of a rule whose statement gives e. If sure is yes the conditions of the rule hold,
// and the end is e. Else they may hold: take notes that the rule may drop or accept, and the packet goes
// on.
func (w *walk) take(e end, sure truth, c *nftChain, r *nftRule) end {
	at := fmt.Sprintf("rule %d of chain %s", r.handle, c.name())
	switch {
	case e == drops && sure == yes:
		if w.why == "" {
			w.why = at
		}
		return drops
	case e == drops && w.mayDrop == "":
		w.mayDrop = at
	case e == accepts && sure != yes:
		w.mayAccept = true
	}
	if sure != yes {
		return goesOn
	}
	return e
}

func (w *walk) verdict(c *nftChain, kind string, raw json.RawMessage, depth int) end {
	if e, ok := endsByKind[kind]; ok {
		return e
	}
	var to struct{ Target string }
	if json.Unmarshal(raw, &to) != nil {
		return goesOn
	}
	e := w.chain(w.set.chains[chainKey{c.key.family, c.key.table, to.Target}], depth+1)
	if kind == "goto" && e == goesOn {
		return returns
	}
	return e
}

// vmap returns the end that a verdict map gives, if the conditions before it hold as surely as sure says. An
// element that only may match is noted, and the next one looked at.
func (w *walk) vmap(c *nftChain, r *nftRule, raw json.RawMessage, sure truth, depth int) end {
	var m struct {
		Key  json.RawMessage
		Data struct {
			Set [][2]json.RawMessage
		}
	}
	if json.Unmarshal(raw, &m) != nil {
		return goesOn
	}
	for _, pair := range m.Data.Set {
		fits := w.equal(m.Key, pair[0])
		if string(pair[0]) == `"*"` {
			fits = yes // what nothing before has matched
		}
		var verdict map[string]json.RawMessage
		if fits == no || json.Unmarshal(pair[1], &verdict) != nil {
			continue
		}
		for kind, to := range verdict {
			if e := w.verdict(c, kind, to, depth); e != goesOn {
				if e = w.take(e, min(sure, fits), c, r); e != goesOn {
					return e
				}
			}
		}
	}
	return goesOn
}

// refusesXT reports whether an extension of iptables-nft ends the way of a packet: those are targets that nft
// has no statement for.
func refusesXT(raw json.RawMessage) bool {
	var x struct{ Type, Name string }
	return json.Unmarshal(raw, &x) == nil && x.Type == "target" && (x.Name == "REJECT" || x.Name == "DROP")
}

// A truth is whether a condition holds.
type truth uint8

const (
	no truth = iota
	unsure
	yes
)

func (w *walk) match(raw json.RawMessage) truth {
	var m struct {
		Op          string
		Left, Right json.RawMessage
	}
	if json.Unmarshal(raw, &m) != nil {
		return unsure
	}
	switch t := w.equal(m.Left, m.Right); m.Op {
	case "==", "in":
		return t
	case "!=":
		return yes - t
	}
	return unsure
}

// equal compares what a rule looks at with a value, a range or a set of them.
func (w *walk) equal(left, right json.RawMessage) truth {
	have, known := w.value(left)
	if !known {
		return unsure
	}
	if have == nil {
		return no // the packet has no such thing
	}
	return equalTo(have, right)
}

// value returns what the packet has in the field that a rule looks at; nil if it has no such field. known
// is false if that cannot be found out here.
func (w *walk) value(left json.RawMessage) (v any, known bool) {
	var l struct {
		Payload *struct{ Protocol, Field string }
		Meta    *struct{ Key string }
		CT      *struct{ Key string }
	}
	if json.Unmarshal(left, &l) != nil {
		return nil, false
	}
	family := map[bool]string{true: "ipv6", false: "ipv4"}[w.p.IPv6]
	switch {
	case l.Payload != nil:
		switch p := l.Payload; {
		case (p.Protocol == "udp" || p.Protocol == "th") && p.Field == "dport":
			return float64(4791), true
		case p.Protocol == "ip" && w.p.IPv6, p.Protocol == "ip6" && !w.p.IPv6,
			slices.Contains([]string{"tcp", "icmp", "icmpv6", "igmp", "sctp", "dccp", "esp", "ah", "arp"}, p.Protocol):
			return nil, true
		case p.Field == "protocol" || p.Field == "nexthdr":
			return "udp", true
		}
	case l.Meta != nil:
		in := w.p.Hook == "input"
		switch k := l.Meta.Key; k {
		case "skuid":
			return w.p.User, !in && len(w.p.User) > 0
		case "l4proto":
			return "udp", true
		case "nfproto":
			return family, true
		case "iifname", "iif", "oifname", "oif":
			if in != strings.HasPrefix(k, "i") {
				return nil, true // the packet goes the other way
			}
			return w.p.Device, true
		}
	case l.CT != nil && l.CT.Key == "state":
		return "new", true
	}
	return nil, false
}

func equalTo(have any, right json.RawMessage) truth {
	var v any
	if json.Unmarshal(right, &v) != nil {
		return unsure
	}
	return equalValue(have, v, 0)
}

func equalValue(have, want any, depth int) truth {
	if depth > maxChains {
		return unsure
	}
	anyOf := func(list []any) truth {
		t := no
		for _, x := range list {
			t = max(t, equalValue(have, x, depth+1))
		}
		return t
	}
	if names, ok := have.([]any); ok { // several names of the same thing
		t := no
		for _, h := range names {
			t = max(t, equalValue(h, want, depth+1))
		}
		return t
	}
	switch want := want.(type) {
	case []any:
		return anyOf(want)
	case map[string]any:
		if list, ok := want["set"].([]any); ok {
			return anyOf(list)
		}
		if r, ok := want["range"].([]any); ok && len(r) == 2 {
			n, isNumber := have.(float64)
			from, ok1 := r[0].(float64)
			to, ok2 := r[1].(float64)
			if !isNumber || !ok1 || !ok2 {
				return unsure
			}
			return truthOf(from <= n && n <= to)
		}
		if e, ok := want["elem"].(map[string]any); ok {
			return equalValue(have, e["val"], depth+1)
		}
	case string:
		if strings.HasPrefix(want, "@") {
			return unsure
		}
		if _, ok := have.(float64); ok {
			return no
		}
		if s, ok := have.(string); ok {
			if star, ok := strings.CutSuffix(want, "*"); ok {
				return truthOf(strings.HasPrefix(s, star))
			}
			return truthOf(s == want)
		}
	case float64:
		if n, ok := have.(float64); ok {
			return truthOf(n == want)
		}
		if have == "udp" {
			return truthOf(want == 17)
		}
		return no
	}
	return unsure
}

func truthOf(b bool) truth {
	if b {
		return yes
	}
	return no
}
