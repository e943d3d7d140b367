$( A small calculus: implication and negation, and the arithmetic of numerals. Every theorem has its proof. $)

$c ( ) -> ~ = + * 0 s wff num |- $.
$v p q r t a b c d $.
wp $f wff p $.
wq $f wff q $.
wr $f wff r $.
wt $f wff t $.
na $f num a $.
nb $f num b $.
nc $f num c $.
nd $f num d $.

$( Formulas. $)
imp $a wff ( p -> q ) $.
not $a wff ~ p $.
equal $a wff a = b $.

$( Numbers. $)
zero $a num 0 $.
next $a num s a $.
plus $a num ( a + b ) $.
times $a num ( a * b ) $.

$( Implication and negation. $)
weaken $a |- ( p -> ( q -> p ) ) $.
spread $a |- ( ( p -> ( q -> r ) ) -> ( ( p -> q ) -> ( p -> r ) ) ) $.
contra $a |- ( ( ~ p -> ~ q ) -> ( q -> p ) ) $.
${
  detach.1 $e |- p $.
  detach.2 $e |- ( p -> q ) $.
  detach $a |- q $.
$}

$( Equality. $)
same $a |- a = a $.
${
  turn.1 $e |- a = b $.
  turn $a |- b = a $.
$}
${
  join.1 $e |- a = b $.
  join.2 $e |- b = c $.
  join $a |- a = c $.
$}
${
  in-next.1 $e |- a = b $.
  in-next $a |- s a = s b $.
$}
${
  in-plus.1 $e |- a = b $.
  in-plus.2 $e |- c = d $.
  in-plus $a |- ( a + c ) = ( b + d ) $.
$}
${
  in-times.1 $e |- a = b $.
  in-times.2 $e |- c = d $.
  in-times $a |- ( a * c ) = ( b * d ) $.
$}

$( Sums and products. $)
plus-zero $a |- ( a + 0 ) = a $.
plus-next $a |- ( a + s b ) = s ( a + b ) $.
times-zero $a |- ( a * 0 ) = 0 $.
times-next $a |- ( a * s b ) = ( ( a * b ) + a ) $.

$( From a formula, that anything implies it. $)
${
  keep.1 $e |- p $.
  keep $p |- ( q -> p ) $= wp wq wp imp keep.1 wp wq weaken detach $.
$}

$( Implications in a chain. $)
${
  chain.1 $e |- ( p -> q ) $.
  chain.2 $e |- ( q -> r ) $.
  chain $p |- ( p -> r ) $=
    wp wq imp wp wr imp chain.1
    wp wq wr imp imp wp wq imp wp wr imp imp
    wq wr imp wp chain.2 keep
    wp wq wr spread detach detach $.
$}

$( Every formula implies itself. $)
self $p |- ( p -> p ) $=
  wp wp wp imp imp wp wp imp wp wp weaken
  wp wp wp imp wp imp imp wp wp wp imp imp wp wp imp imp
  wp wp wp imp weaken wp wp wp imp wp spread detach detach $.
