package softroce

// The ECN bits of a traffic class (RFC 3168 section 5).
const (
	ecnMask = 3
	ecnECT0 = 2
	ecnCE   = 3
)

// withoutECN has packets on p leave without ECN: nothing is heard from its other end,
// and this may be why.
func (p *path) withoutECN() {
	if p.attr.TrafficClass&ecnMask == 0 {
		return
	}
	s := p.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	p.attr.TrafficClass &^= ecnMask
	p.head.TrafficClass = p.attr.TrafficClass
	p.bind()
	if s.cut != nil && s.cut.path == p {
		s.uncut() // it has the old one
	}
	s.dev.count.ecnOff.Add(1)
	s.dev.log.Debug("no answer on a path, going on without ECN", "dgid", p.attr.DGID)
}
