package neigh

// A queue holds the packets that wait for one neighbour. It is never empty.
type queue struct {
	packets [][]byte
	octets  int
}

// enqueue queues pkt for e. If that would exceed a bound, it first discards the oldest packets of e
// (RFC 4861 section 7.2.2), because somebody still waits for the latest, and never packets of other
// neighbours, even at the bound for all of them. If pkt still exceeds a bound, it discards pkt.
func (t *Table) enqueue(e *entry, pkt []byte) {
	if pkt == nil {
		return
	}
	own := 0
	if e.queue != nil {
		own = e.queue.octets
	}
	switch { // the packet has no room even if all others of e go
	case t.o.maxQueuedPackets() < 1:
		t.discard(e.ip, pkt, DropQueuePackets)
		return
	case len(pkt) > t.o.maxQueuedOctets():
		t.discard(e.ip, pkt, DropQueueOctets)
		return
	case t.queued-own+len(pkt) > t.o.maxTotalOctets():
		t.discard(e.ip, pkt, DropQueueTotal)
		return
	}
	for e.queue != nil && len(e.queue.packets) >= t.o.maxQueuedPackets() {
		t.discardOldest(e, DropQueuePackets)
	}
	for e.queue != nil && e.queue.octets+len(pkt) > t.o.maxQueuedOctets() {
		t.discardOldest(e, DropQueueOctets)
	}
	for e.queue != nil && t.queued+len(pkt) > t.o.maxTotalOctets() {
		t.discardOldest(e, DropQueueTotal)
	}
	if e.queue == nil {
		e.queue = new(queue)
	}
	e.queue.packets = append(e.queue.packets, pkt)
	e.queue.octets += len(pkt)
	t.queued += len(pkt)
}

func (t *Table) discardOldest(e *entry, why Drop) {
	q := e.queue
	pkt := q.packets[0]
	q.packets[0] = nil
	q.packets = q.packets[1:]
	q.octets -= len(pkt)
	t.queued -= len(pkt)
	if len(q.packets) == 0 {
		e.queue = nil
	}
	t.discard(e.ip, pkt, why)
}

func (t *Table) discardQueue(e *entry, why Drop) {
	for e.queue != nil {
		t.discardOldest(e, why)
	}
}

// takeQueue empties the queue of e and returns its packets.
func (t *Table) takeQueue(e *entry) (packets [][]byte) {
	if q := e.queue; q != nil {
		packets = q.packets
		t.queued -= q.octets
		e.queue = nil
	}
	return packets
}
