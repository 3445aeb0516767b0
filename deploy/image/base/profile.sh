# Debian's /etc/profile sets PATH anew in login shells; this puts back what the image's PATH has beside it.
case ":$PATH:" in
  *:/opt/jupyter/bin:*) ;;
  *) PATH="/opt/jupyter/bin:$PATH" ;;
esac
case ":$PATH:" in
  *":$HOME/.local/bin:"*) ;;
  *) PATH="$HOME/.local/bin:$PATH" ;;
esac
export PATH
