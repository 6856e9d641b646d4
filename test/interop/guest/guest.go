// Package guest holds the files that run inside the virtual machines: the init script,
// the verbs program in C, and our part of the module of a soft InfiniBand port. guestd,
// which starts commands for the host, is a program of its own below it.
package guest

import "embed"

// Init is /init: it mounts, loads modules, sets the network up and becomes guestd.
//
//go:embed init
var Init []byte

// Peer is the source of the verbs program. It needs libibverbs.
//
//go:embed src/peer.c
var Peer []byte

// SoftIB has the source that a soft InfiniBand port needs beside that of the kernel's Soft-RoCE.
//
//go:embed softib
var SoftIB embed.FS

// Port is the name of the virtual serial port between guestd and the host.
const Port = "ipoibcm.ctl"

// A ToGuest is one line of JSON from the host.
type ToGuest struct {
	Op   string   `json:"op"` // start, stdin, eof, kill
	ID   int      `json:"id"`
	Argv []string `json:"argv,omitempty"` // start
	Data []byte   `json:"data,omitempty"` // stdin
}

// A FromGuest is one line of JSON to the host: output of a command, its end, or
// (ID 0) that the guest is ready.
type FromGuest struct {
	ID   int    `json:"id"`
	Out  []byte `json:"out,omitempty"`
	Done bool   `json:"done,omitempty"`
	Exit int    `json:"exit,omitempty"` // exit status; 128 plus the signal if a signal ended the command
}
