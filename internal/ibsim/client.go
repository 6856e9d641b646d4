// Package ibsim runs a simulated InfiniBand subnet with a real subnet manager: the fabric
// simulator ibsim (0.10 to 0.12) and opensm, both programs of the system, and clients in
// pure Go that send and receive MADs at the simulator's host ports.
//
// Simulator and clients exchange messages over datagram sockets, whose abstract names are local
// to the network namespace. They need neither privilege nor a network. There is no data
// plane, and a MAD is never lost unless a link is down.
//
// It is for tests.
package ibsim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"ipoibcm/ib"
	"ipoibcm/sa"
	"ipoibcm/wire/mad"
)

// Control messages of the simulator: 16 octets of header in host byte order, 64 of
// data.
const (
	controlLen   = 80
	controlMagic = 0xdeadbeef

	opConnect    = 1
	opDisconnect = 2
	opNodeInfo   = 7
	opPortInfo   = 8
	opPKeys      = 10
)

// A data message of the simulator is an address in 32 octets, and a MAD.
const (
	envelopeLen = 32
	messageLen  = envelopeLen + mad.Len
)

// QPN is the QP from which a Client sends and at which it receives. The simulator gives QP 1
// of a port to one program only.
const QPN ib.QPN = 0x800001

var lastID atomic.Uint32

// A Client sends and receives MADs at one host port.
type Client struct {
	Node string

	control, data *net.UnixConn
	out           *net.UnixAddr
	slot          uint32
}

// Dial attaches to port 1 of a node.
func (f *Fabric) Dial(node string) (*Client, error) {
	id := lastID.Add(1)<<16 | uint32(time.Now().Nanosecond())&0xffff
	c := &Client{Node: node}
	var err error
	c.control, err = net.DialUnix("unixgram", abstract("%s:ctl%d", f.name, id), abstract("%s:ctl", f.name))
	if err != nil {
		return nil, err
	}
	// The simulator connects to this socket while it handles the request.
	if c.data, err = net.ListenUnixgram("unixgram", abstract("%s:in%d", f.name, id)); err != nil {
		return nil, errors.Join(err, c.control.Close())
	}
	request := make([]byte, 44)
	binary.NativeEndian.PutUint32(request, id)
	binary.NativeEndian.PutUint32(request[4:], uint32(QPN))
	copy(request[12:43], node)
	reply, err := c.ask(opConnect, request)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attach to %s: %w", node, err), c.control.Close(), c.data.Close())
	}
	c.slot = binary.NativeEndian.Uint32(reply)
	c.out = abstract("%s:out%d", f.name, c.slot)
	return c, nil
}

// abstract returns the address of an abstract socket. Every name ends with a zero octet.
func abstract(format string, args ...any) *net.UnixAddr {
	return &net.UnixAddr{Net: "unixgram", Name: "@" + fmt.Sprintf(format, args...) + "\x00"}
}

// ask sends a control message and returns the data of the answer.
func (c *Client) ask(op uint32, data []byte) ([]byte, error) {
	b := make([]byte, controlLen)
	for i, v := range []uint32{controlMagic, c.slot, op, uint32(len(data))} {
		binary.NativeEndian.PutUint32(b[4*i:], v)
	}
	copy(b[16:], data)
	if _, err := c.control.Write(b); err != nil {
		return nil, err
	}
	if err := c.control.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return nil, err
	}
	if n, err := c.control.Read(b); err != nil || n != controlLen {
		return nil, fmt.Errorf("control answer of %d octets: %w", n, err)
	}
	if binary.NativeEndian.Uint32(b[8:]) == 0 {
		return nil, fmt.Errorf("the simulator refuses request %d", op)
	}
	return b[16:], nil
}

// Close detaches from the node.
func (c *Client) Close() error {
	_, err := c.ask(opDisconnect, nil)
	return errors.Join(err, c.control.Close(), c.data.Close())
}

// Port returns the present state of the port.
func (c *Client) Port() (sa.Port, error) {
	request := make([]byte, 64)
	request[0] = 1
	info, err := c.ask(opPortInfo, request)
	if err != nil {
		return sa.Port{}, err
	}
	node, err := c.ask(opNodeInfo, make([]byte, 64))
	if err != nil {
		return sa.Port{}, err
	}
	p := sa.Port{
		Active: info[32]&15 == 4,
		LID:    ib.LID(binary.BigEndian.Uint16(info[16:])), SMLID: ib.LID(binary.BigEndian.Uint16(info[18:])),
	}
	copy(p.GID[:8], info[8:16])
	binary.BigEndian.PutUint64(p.GID[8:], binary.BigEndian.Uint64(node[12:])+1) // the port's GUID follows the node's
	return p, nil
}

// PKeys returns the P_Key table of the port, without empty entries.
func (c *Client) PKeys() (keys []ib.PKey, err error) {
	b, err := c.ask(opPKeys, make([]byte, 64))
	for i := 0; err == nil && i < 64; i += 2 {
		if k := ib.PKey(binary.BigEndian.Uint16(b[i:])); k&^ib.PKeyFull != 0 {
			keys = append(keys, k)
		}
	}
	return keys, err
}

// Send sends a MAD once.
func (c *Client) Send(m *sa.MAD) error {
	b := make([]byte, messageLen)
	binary.BigEndian.PutUint16(b, uint16(m.Peer.LID))
	binary.BigEndian.PutUint32(b[8:], uint32(m.Peer.QPN))
	binary.BigEndian.PutUint32(b[12:], uint32(QPN))
	binary.BigEndian.PutUint64(b[24:], mad.Len)
	copy(b[envelopeLen:], m.Data[:])
	_, err := c.data.WriteToUnix(b, c.out)
	return err
}

// ErrUndelivered says that the simulator returned a MAD of ours, because it could not deliver it.
var ErrUndelivered = errors.New("ibsim: MAD not delivered")

// Receive waits for a MAD. After Close it returns an error.
func (c *Client) Receive() (*sa.MAD, error) {
	b := make([]byte, messageLen+1)
	switch n, err := c.data.Read(b); {
	case err != nil:
		return nil, err
	case n != messageLen:
		return nil, fmt.Errorf("ibsim: message of %d octets, want %d", n, messageLen)
	case binary.BigEndian.Uint32(b[16:]) != 0:
		return nil, ErrUndelivered
	}
	from, qpn := binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint32(b[12:])
	m := &sa.MAD{Peer: sa.Address{LID: ib.LID(from), QPN: ib.QPN(qpn)}}
	copy(m.Data[:], b[envelopeLen:messageLen])
	return m, nil
}
