package session

import (
	"encoding/binary"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Terminal modes of RFC 4254, section 8, and RFC 8160 (IUTF8). Speeds (128, 129) mean nothing on a pseudo terminal.

func controlChars() map[byte]int {
	return map[byte]int{
		1: unix.VINTR, 2: unix.VQUIT, 3: unix.VERASE, 4: unix.VKILL, 5: unix.VEOF, 6: unix.VEOL, 7: unix.VEOL2, 8: unix.VSTART,
		9: unix.VSTOP, 10: unix.VSUSP, 12: unix.VREPRINT, 13: unix.VWERASE, 14: unix.VLNEXT, 16: unix.VSWTC, 18: unix.VDISCARD,
	}
}

func inputFlags() map[byte]uint32 {
	return map[byte]uint32{
		30: unix.IGNPAR, 31: unix.PARMRK, 32: unix.INPCK, 33: unix.ISTRIP, 34: unix.INLCR, 35: unix.IGNCR, 36: unix.ICRNL,
		37: unix.IUCLC, 38: unix.IXON, 39: unix.IXANY, 40: unix.IXOFF, 41: unix.IMAXBEL, 42: unix.IUTF8,
	}
}

func localFlags() map[byte]uint32 {
	return map[byte]uint32{
		50: unix.ISIG, 51: unix.ICANON, 52: unix.XCASE, 53: unix.ECHO, 54: unix.ECHOE, 55: unix.ECHOK, 56: unix.ECHONL,
		57: unix.NOFLSH, 58: unix.TOSTOP, 59: unix.IEXTEN, 60: unix.ECHOCTL, 61: unix.ECHOKE, 62: unix.PENDIN,
	}
}

func outputFlags() map[byte]uint32 {
	return map[byte]uint32{70: unix.OPOST, 71: unix.OLCUC, 72: unix.ONLCR, 73: unix.OCRNL, 74: unix.ONOCR, 75: unix.ONLRET}
}

func applyModes(slave *os.File, modes []byte) error {
	raw, err := slave.SyscallConn()
	if err != nil {
		return fmt.Errorf("terminal modes: %w", err)
	}
	var inner error
	err = raw.Control(func(fd uintptr) {
		termios, err := unix.IoctlGetTermios(int(fd), unix.TCGETS)
		if err != nil {
			inner = fmt.Errorf("read terminal modes: %w", err)
			return
		}
		setModes(termios, modes)
		inner = unix.IoctlSetTermios(int(fd), unix.TCSETS, termios)
	})
	if err != nil {
		return err
	}
	return inner
}

// setModes applies (opcode, uint32) pairs up to opcode 0 or the first one of 160 and above, as the RFC says; unknown ones are
// passed over.
func setModes(t *unix.Termios, modes []byte) {
	for len(modes) >= 5 && modes[0] != 0 && modes[0] < 160 {
		op, value := modes[0], binary.BigEndian.Uint32(modes[1:5])
		modes = modes[5:]
		if at, ok := controlChars()[op]; ok {
			if value == 255 { // "undefined"
				value = 0
			}
			t.Cc[at] = byte(value)
		}
		setFlag(&t.Iflag, inputFlags()[op], value)
		setFlag(&t.Lflag, localFlags()[op], value)
		setFlag(&t.Oflag, outputFlags()[op], value)
		switch op {
		case 90, 91: // CS7, CS8
			if value != 0 {
				t.Cflag = t.Cflag&^unix.CSIZE | map[byte]uint32{90: unix.CS7, 91: unix.CS8}[op]
			}
		case 92:
			setFlag(&t.Cflag, unix.PARENB, value)
		case 93:
			setFlag(&t.Cflag, unix.PARODD, value)
		}
	}
}

func setFlag(field *uint32, flag, value uint32) {
	if value == 0 {
		*field &^= flag
		return
	}
	*field |= flag
}
