//go:build !amd64 || purego

package sums

// canFold says whether foldCRC is there.
var canFold = false

func foldCRC(uint32, []byte) uint32 { panic("sums: no vector instructions") }
