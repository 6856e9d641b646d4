package neigh

// A queue is the packets that wait for one neighbour; never empty.
type queue struct {
	packets [][]byte
	octets  int
}

// enqueue lets pkt wait for e. Where a bound of this neighbour would be passed,
// its oldest packets go (RFC 4861 section 7.2.2): the latest ones are the ones
// somebody still waits for. The bound of all neighbours costs only the neighbour
// that would pass it, never others.
func (t *Table) enqueue(dst []Action, e *entry, pkt []byte) []Action {
	if pkt == nil {
		return dst
	}
	for e.queue != nil && len(e.queue.packets) >= t.o.maxQueuedPackets() {
		dst = t.discardOldest(dst, e, DropQueuePackets)
	}
	for e.queue != nil && e.queue.octets+len(pkt) > t.o.maxQueuedOctets() {
		dst = t.discardOldest(dst, e, DropQueueOctets)
	}
	for e.queue != nil && t.queued+len(pkt) > t.o.maxTotalOctets() {
		dst = t.discardOldest(dst, e, DropQueueTotal)
	}
	switch {
	case t.o.maxQueuedPackets() < 1:
		return t.discard(dst, e.ip, pkt, DropQueuePackets)
	case len(pkt) > t.o.maxQueuedOctets():
		return t.discard(dst, e.ip, pkt, DropQueueOctets)
	case t.queued+len(pkt) > t.o.maxTotalOctets():
		return t.discard(dst, e.ip, pkt, DropQueueTotal)
	}
	if e.queue == nil {
		e.queue = new(queue)
	}
	e.queue.packets = append(e.queue.packets, pkt)
	e.queue.octets += len(pkt)
	t.queued += len(pkt)
	return dst
}

func (t *Table) discardOldest(dst []Action, e *entry, why Drop) []Action {
	q := e.queue
	pkt := q.packets[0]
	q.packets[0] = nil
	q.packets = q.packets[1:]
	q.octets -= len(pkt)
	t.queued -= len(pkt)
	if len(q.packets) == 0 {
		e.queue = nil
	}
	return t.discard(dst, e.ip, pkt, why)
}

func (t *Table) discardQueue(dst []Action, e *entry, why Drop) []Action {
	for e.queue != nil {
		dst = t.discardOldest(dst, e, why)
	}
	return dst
}

// takeQueue returns the packets that waited for e, to be handed back.
func (t *Table) takeQueue(e *entry) (packets [][]byte) {
	if q := e.queue; q != nil {
		packets = q.packets
		t.queued -= q.octets
		e.queue = nil
	}
	return packets
}
