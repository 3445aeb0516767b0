package fleet_test

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/carrel-dev/carrel/services/fleet"
)

func TestErrorKeepsKindMessageAndCauseApart(t *testing.T) {
	cause := fmt.Errorf("read page 7: %w", io.ErrUnexpectedEOF)
	for name, c := range map[string]struct {
		err     error
		kind    fleet.Kind
		message string // for users
		text    string // for the log
		is      error
	}{
		"plain":             {cause, fleet.KindInternal, "internal error; the gateway's log has the cause", cause.Error(), io.ErrUnexpectedEOF},
		"errorf":            {fleet.Errorf(fleet.KindInvalid, "use %d", 3), fleet.KindInvalid, "use 3", "use 3", nil},
		"errorf with cause": {fleet.Errorf(fleet.KindConflict, "settings: %w", cause), fleet.KindConflict, "settings: " + cause.Error(), "settings: " + cause.Error(), io.ErrUnexpectedEOF},
		"wrap":              {fleet.Wrap(cause, fleet.KindUnavailable, "try %s", "again"), fleet.KindUnavailable, "try again", "try again: " + cause.Error(), io.ErrUnexpectedEOF},
		"wrapped outside":   {fmt.Errorf("start w1: %w", fleet.Wrap(cause, fleet.KindExhausted, "full")), fleet.KindExhausted, "full", "start w1: full: " + cause.Error(), io.ErrUnexpectedEOF},
		"outermost counts":  {fleet.Wrap(fleet.Errorf(fleet.KindNotFound, "inner"), fleet.KindConflict, "outer"), fleet.KindConflict, "outer", "outer: inner", nil},
		"percent":           {fleet.Wrap(cause, fleet.KindInvalid, "%s", "100%"), fleet.KindInvalid, "100%", "100%: " + cause.Error(), nil},
	} {
		t.Run(name, func(t *testing.T) {
			if got := fleet.KindOf(c.err); got != c.kind {
				t.Errorf("kind %s", got)
			}
			if got := fleet.UserMessage(c.err); got != c.message {
				t.Errorf("users see %q", got)
			}
			if got := c.err.Error(); got != c.text {
				t.Errorf("the log gets %q", got)
			}
			if c.is != nil && !errors.Is(c.err, c.is) {
				t.Error("the cause is out of reach")
			}
			if !fleet.IsKind(c.err, c.kind) || fleet.IsKind(c.err, c.kind+1) {
				t.Error("IsKind disagrees")
			}
		})
	}
	if fleet.Wrap(nil, fleet.KindInternal, "x") != nil || fleet.IsKind(nil, fleet.KindInternal) {
		t.Error("no error became one")
	}
}

func TestKindsHaveDistinctWords(t *testing.T) {
	seen := map[string]bool{}
	for k := fleet.KindInternal; k <= fleet.KindUnavailable; k++ {
		word := k.String()
		if word == "" || seen[word] || strings.ToLower(word) != word {
			t.Errorf("kind %d has the word %q", k, word)
		}
		seen[word] = true
	}
	if fleet.Kind(200).String() != "internal" {
		t.Error("an unknown kind is internal")
	}
}
