package mad

import (
	"encoding/binary"

	"ipoibcm/ib"
	"ipoibcm/wire"
)

// A PathInfo is the primary or the alternate path in a REQ or LAP, seen from
// its sender. All zero means that there is no alternate path.
type PathInfo struct {
	LocalLID, RemoteLID ib.LID // PermissiveLID on RoCE
	LocalGID, RemoteGID ib.GID
	FlowLabel           uint32 // 20 bits
	PacketRate          uint8  // 6 bits, a rate code
	TrafficClass        uint8
	HopLimit            uint8
	SL                  uint8 // 4 bits
	SubnetLocal         bool  // set if HopLimit is 0 or 1
	LocalACKTimeout     ib.Timeout
}

// put writes p in the layout of a REQ into b[:44].
func (p PathInfo) put(b []byte) {
	p.putAddrs(b)
	binary.BigEndian.PutUint32(b[36:], p.FlowLabel<<12|uint32(p.PacketRate&0x3f))
	b[40], b[41] = p.TrafficClass, p.HopLimit
	p.putTail(b[42:])
}

func readPathInfo(b []byte) (p PathInfo) {
	p.readAddrs(b)
	v := binary.BigEndian.Uint32(b[36:])
	p.FlowLabel, p.PacketRate = v>>12, uint8(v&0x3f)
	p.TrafficClass, p.HopLimit = b[40], b[41]
	p.readTail(b[42:])
	return p
}

// putLAP writes p in the layout of a LAP, whose middle differs, into b[:44].
func (p PathInfo) putLAP(b []byte) {
	p.putAddrs(b)
	wire.PutUint24(b[36:], p.FlowLabel<<4)
	b[39], b[40], b[41] = p.TrafficClass, p.HopLimit, p.PacketRate&0x3f
	p.putTail(b[42:])
}

func readPathInfoLAP(b []byte) (p PathInfo) {
	p.readAddrs(b)
	p.FlowLabel = wire.Uint24(b[36:]) >> 4
	p.TrafficClass, p.HopLimit, p.PacketRate = b[39], b[40], b[41]&0x3f
	p.readTail(b[42:])
	return p
}

func (p PathInfo) putAddrs(b []byte) {
	binary.BigEndian.PutUint16(b, uint16(p.LocalLID))
	binary.BigEndian.PutUint16(b[2:], uint16(p.RemoteLID))
	copy(b[4:20], p.LocalGID[:])
	copy(b[20:36], p.RemoteGID[:])
}

func (p *PathInfo) readAddrs(b []byte) {
	p.LocalLID, p.RemoteLID = ib.LID(binary.BigEndian.Uint16(b)), ib.LID(binary.BigEndian.Uint16(b[2:]))
	p.LocalGID, p.RemoteGID = ib.GID(b[4:20]), ib.GID(b[20:36])
}

func (p PathInfo) putTail(b []byte) {
	b[0] = p.SL<<4 | wire.Bit(p.SubnetLocal, 0x08)
	b[1] = byte(p.LocalACKTimeout) << 3
}

func (p *PathInfo) readTail(b []byte) {
	p.SL, p.SubnetLocal = b[0]>>4, b[0]&0x08 != 0
	p.LocalACKTimeout = ib.Timeout(b[1] >> 3)
}
